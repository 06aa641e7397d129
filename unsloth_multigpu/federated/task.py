"""A message to a client, and what becomes of it."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message

from unsloth_multigpu.federated.device import SlotDevice

# Flower's codes for what its own SuperNodes report; the names are in flwr.common.constant, which is not public.
REPLY_UNAVAILABLE, CLIENT_RAISED, CLIENT_CRASHED = 4, 2, 8


@dataclass(frozen=True)
class ClientRecord:
    """One message to one client.

    Args:
        client_id: 0 .. num_clients - 1.
        slot: Number of the slot that answered it, or was the last to try; -1 = it was not begun.
        device: That slot's device, like "cuda:1"; "" = it was not begun.
        kind: "train", "evaluate" or "query".
        begin_s: When that slot got it, on the clock of `time.monotonic`.
        seconds: From then until its reply was here.
        peak_memory_bytes: On an accelerator what torch reserved there at most, on the CPU what the process held.
        error: One line; None = it was answered.
        attempts: How often a slot began with it.
    """

    client_id: int
    slot: int
    device: str
    kind: str
    begin_s: float
    seconds: float
    peak_memory_bytes: int
    error: str | None
    attempts: int


@dataclass(eq=False)
class Task:
    """A message on its way.

    Attributes:
        context: The client's. Its state is what the last task left there.
        reply: None until it is there.
        is_first: The slot's process has done nothing before: it loads the model as well.
    """

    message: Message
    context: Context
    reply: Message | None = None
    slot: int = -1
    device: SlotDevice | None = None
    begin_s: float = 0.0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    error: str | None = None
    attempts: int = 0
    is_first: bool = False
    server_round: int = field(init=False)

    def __post_init__(self) -> None:
        configs = self.message.content.config_records.values() if self.message.has_content() else ()
        rounds = [config["server-round"] for config in configs if "server-round" in config]
        self.server_round = int(str(rounds[0])) if rounds else 0

    @property
    def client_id(self) -> int:
        """Its node's number, from 0."""
        return self.context.node_id - 1

    @property
    def kind(self) -> str:
        """ "train", "evaluate" or "query"."""
        return self.message.metadata.message_type.partition(".")[0]

    @property
    def num_examples(self) -> int:
        """What the reply says; 0 where it names none."""
        if self.reply is None or not self.reply.has_content():
            return 0
        found = [m["num-examples"] for m in self.reply.content.metric_records.values() if "num-examples" in m]
        return int(found[0]) if found and not isinstance(found[0], list) else 0

    def begin(self, slot: int, device: SlotDevice, *, is_first: bool) -> None:
        """Notes that a slot has it now."""
        self.slot, self.device, self.is_first = slot, device, is_first
        self.begin_s = time.monotonic()
        self.attempts += 1

    def pack(self) -> bytes:
        """What the slot gets. Made when one is free: all clients' arrays at once may be more than the memory."""
        return pickle.dumps((self.message, self.context), pickle.HIGHEST_PROTOCOL)

    def place(self) -> str:
        """Who works on it where: "client 3 (round 2, train) on slot 1, cuda:1"."""
        what = f"client {self.client_id} (round {self.server_round}, {self.kind})"
        return what if self.device is None else f"{what} on slot {self.slot}, {self.device}"

    def fail(self, code: int, error: str) -> None:
        """Answers it with an error, which Flower's strategies leave out of the round."""
        self.error = f"{self.place()}: {error}"
        self.answer(Message(Error(code=code, reason=self.error), reply_to=self.message))

    def answer(self, reply: Message) -> None:
        """Ends it."""
        self.reply = reply
        if self.attempts:
            self.seconds = time.monotonic() - self.begin_s

    def record(self) -> ClientRecord:
        """What is to be reported of it."""
        return ClientRecord(
            client_id=self.client_id,
            slot=self.slot,
            device="" if self.device is None else str(self.device),
            kind=self.kind,
            begin_s=self.begin_s,
            seconds=self.seconds,
            peak_memory_bytes=self.peak_memory_bytes,
            error=self.error,
            attempts=self.attempts,
        )
