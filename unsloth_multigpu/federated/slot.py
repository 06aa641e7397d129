"""One slot, as the server sees it: a place for one client at a time, and the process that now fills it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message

from unsloth_multigpu.federated.device import SlotDevice
from unsloth_multigpu.federated.report import ClientRecord
from unsloth_multigpu.wire.child import Child
from unsloth_multigpu.wire.folder import make_log
from unsloth_multigpu.wire.frames import Frames
from unsloth_multigpu.wire.process import send_signal
from unsloth_multigpu.wire.stack import main_frames, place_of

# The server sends it to ask where in its code a client is.
STACK_SIGNAL = signal.SIGUSR2
# The slot imports the user's modules and this package from where this process finds them.
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[3])
from unsloth_multigpu.federated.worker import main
main()"""
# A process that has not read a message within this time is taken for dead.
_SEND_LIMIT_S = 300.0
# Time for a process that has closed its socket to end.
_END_S = 1.0
# Time for a process to write its stacks after the signal. A stopped process writes none.
_STACK_S = 0.2


@dataclass(eq=False)
class Task:
    """A message on its way to a slot and back.

    Attributes:
        context: Of the client.
        reply: None until it is there.
        is_first: The first task of its slot's process, which loads the model as well.
    """

    message: Message
    context: Context
    record: ClientRecord
    reply: Message | None = None
    is_first: bool = False

    def answer(self, reply: Message) -> None:
        """Ends it."""
        self.reply = reply
        if self.record.attempts:
            self.record.seconds = time.monotonic() - self.record.begin_s

    def fail(self, code: int, error: str) -> str:
        """Ends it with an error, which Flower's strategies leave out of the round; returns the error with its place."""
        self.record.error = f"{self.place()}: {error}"
        self.answer(Message(Error(code=code, reason=self.record.error), reply_to=self.message))
        return self.record.error

    def place(self) -> str:
        """Who works on it where: "client 3 (round 2, train) on slot 1, cuda:1"."""
        record, configs = self.record, self.message.content.config_records.values()
        server_round = next((str(config["server-round"]) for config in configs if "server-round" in config), "0")
        where = f" on slot {record.slot}, {record.device}" if record.attempts else ""
        return f"client {record.client_id} (round {server_round}, {record.kind}){where}"


class Slot:
    """Starts and ends the slot's processes, one after the other.

    Args:
        index: Its place among all slots.
        device: The only one that its processes see.
        log_dir: Where slot_N.log is.

    Attributes:
        task: What its client is doing; None = it waits.
        is_ready: Its process takes tasks.
        is_fresh: Its process has taken none yet.
        num_failed_starts: Since it last answered.
        is_retired: It gets no process any more.
    """

    def __init__(self, index: int, device: SlotDevice, log_dir: Path) -> None:
        self.index = index
        self.device = device
        self.log = log_dir / f"slot_{index}.log"
        self.task: Task | None = None
        self.is_ready = False
        self.is_fresh = True
        self.started_s = 0.0
        self.num_failed_starts = 0
        self.is_retired = False
        self._process: tuple[Child, Frames] | None = None
        make_log(self.log)

    def __str__(self) -> str:
        return f"slot {self.index} on {self.device}"

    @property
    def pid(self) -> int | None:
        """Of its process; None where it has none."""
        return self._process[0].pid if self._process else None

    def start(self, environment: Mapping[str, str]) -> None:
        """Starts a process, which says "hello" when it can be sent to."""
        arguments = [str(os.getpid()), json.dumps([str(folder) for folder in sys.path])]
        child = Child(str(self), _PROGRAM, self.log, environment, arguments)
        self._process = child, Frames(child.connection, _SEND_LIMIT_S)
        self.is_ready, self.is_fresh, self.started_s = False, True, time.monotonic()

    def send(self, *fields: Any) -> None:
        """Sends to the process. One that has ended, or does not read and is killed, shows that by its descriptors."""
        assert self._process is not None
        child, frames = self._process
        try:
            frames.send(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))
        except OSError:
            if not child.has_ended(_END_S):
                child.kill("it does not read")

    def give(self, task: Task) -> None:
        """Lets the process work on a task, pickled only now: all clients' arrays may be more than the memory."""
        self.task, record = task, task.record
        record.slot, record.device, record.begin_s = self.index, str(self.device), time.monotonic()
        record.attempts += 1
        task.is_first, self.is_fresh = self.is_fresh, False
        self.send(task.message, task.context)

    def descriptors(self) -> list[int]:
        """They are readable when there is something to `receive`, or the process has ended."""
        return [self._process[1].fileno(), self._process[0].pid_descriptor] if self._process else []

    def receive(self) -> list[tuple[Any, ...]] | None:
        """What the process has said by now; None = it has ended, or is about to."""
        assert self._process is not None
        child, frames = self._process
        has_ended = child.has_ended()  # Asked first: the last message of a process that has ended counts.
        if not frames.has_more():
            return None if has_ended else []
        messages = frames.receive()
        # Safe to unpickle: it comes from our own child, which runs the same user's code.
        return None if messages is None else [pickle.loads(data) for data in messages]

    def end(self, because: str = "") -> str:
        """Kills the process and what it has started; returns how it ended, in one line."""
        process, self._process, self.task, self.is_ready = self._process, None, None, False
        if process is None:
            return ""
        child, frames = process
        if child.is_mine():
            if because:
                child.kill(because)
            child.collect()
        frames.close()
        os.close(child.pid_descriptor)
        return child.describe_end()

    def place_in_code(self) -> str:
        """The line of the user's code that the process is at; "" where it does not say."""
        assert self._process is not None
        with suppress(OSError):  # The log was removed.
            before = self.log.read_bytes()
            send_signal(self._process[0].pid, STACK_SIGNAL)
            self._process[0].has_ended(_STACK_S)
            return place_of(main_frames(self.log.read_bytes()[len(before) :].decode(errors="replace")))
        return ""
