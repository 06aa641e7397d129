"""A slot of a server: runs one client after the other in its current process."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.federated.placement import SlotDevice
from unsloth_multigpu.federated.round_report import ClientRecord
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.child import Child, read_tail
from unsloth_multigpu.wire.folder import make_log

logger = get_logger(__name__)

# With the sys.path of this process, to import the user's modules and this package.
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[3])
from unsloth_multigpu.federated.client_worker import main
main()"""


class SlotEnded(Exception):
    """The slot's process has ended; the text describes how."""


@dataclass(eq=False)
class Task:
    """A message to a client, and its reply.

    Attributes:
        context: Flower's context of the client.
        reply: None until it has arrived.
    """

    message: Message
    context: Context
    record: ClientRecord
    reply: Message | None = None

    def begin(self, slot: Slot) -> None:
        record = self.record
        record.slot, record.device, record.begin_s = slot.index, str(slot.device), time.monotonic()
        record.attempts += 1

    def answer(self, reply: Message) -> None:
        """Ends the task with a reply."""
        self.reply = reply
        if self.record.attempts:
            self.record.seconds = time.monotonic() - self.record.begin_s

    def fail(self, code: int, error: str) -> str:
        """Ends the task with an error reply, which strategies leave out. Returns the error with `place()`."""
        self.record.error = f"{self.place()}: {error}"
        self.answer(Message(Error(code=code, reason=self.record.error), reply_to=self.message))
        return self.record.error

    def place(self) -> str:
        """Describes the task: "client 3 (round 2, train) on slot 1, cuda:1"."""
        record, configs = self.record, self.message.content.config_records.values()
        server_round = next((str(config["server-round"]) for config in configs if "server-round" in config), "0")
        where = f" on slot {record.slot}, {record.device}" if record.attempts else ""
        return f"client {record.client_id} (round {server_round}, {record.kind}){where}"


class Slot:
    """Starts and ends the slot's processes, one after the other. One thread uses it; any thread may call `kill`.

    Its processes see only its device; `log_dir` has their output, slot_N.log.

    Attributes:
        is_retired: A process has failed to start, and no other one will be started.
    """

    def __init__(self, index: int, device: SlotDevice, log_dir: Path) -> None:
        self.index = index
        self.device = device
        self.log = log_dir / f"slot_{index}.log"
        self.is_retired = False
        self._process: Child | None = None
        make_log(self.log)

    def __str__(self) -> str:
        return f"slot {self.index} on {self.device}"

    def start(self, app: bytes, environment: Mapping[str, str]) -> None:
        """Starts a process unless one lives, and waits until it is ready.

        Raises SlotEnded if it has ended, for example because its device does not work; SetupError if it cannot load the
        app.
        """
        if self._process is not None:
            if not self._process.has_ended():
                return
            logger.warning("%s while it was idle; a new process is started", self.end())
        arguments = [str(os.getpid()), json.dumps([str(folder) for folder in sys.path])]
        self._process = Child(str(self), _PROGRAM, self.log, environment, arguments)
        kind, *error = self.call(self.device.kind, sys.argv, app)
        if kind == "unloadable":
            raise SetupError(
                f"{self} cannot load the clients' functions: {error[0]}\n{read_tail(self.log)}",
                hint="Modules that they use must be importable in another process, without the script.",
            )

    def call(self, *fields: Any) -> tuple[Any, ...]:
        """Sends a message to the process and waits for its answer.

        Raises SlotEnded if the process has ended, or was killed because it is unusable.
        """
        assert self._process is not None
        child = self._process
        with suppress(OSError, EOFError):  # Raised if it has ended.
            child.connection.send_bytes(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))
            # Safe to unpickle: it comes from our own child process of the same user.
            answer: tuple[Any, ...] = pickle.loads(child.connection.recv_bytes())
            if answer[0] != "unusable":
                return answer
            child.kill(answer[1])
        raise SlotEnded(self.end())

    def kill(self, because: str) -> None:
        """Kills the process and its children. A thread that waits for its answer gets SlotEnded."""
        if self._process is not None:
            self._process.kill(because)

    def end(self) -> str:
        """Kills the process and its children, and collects it. Returns how it ended, in one line."""
        child, self._process = self._process, None
        if child is None:
            return ""
        if child.is_mine():
            child.collect()
        child.connection.close()
        os.close(child.pid_descriptor)
        return child.describe_end()
