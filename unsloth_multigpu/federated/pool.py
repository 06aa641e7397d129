"""The slots of a server: each runs one client after the other in a process, and has a thread that gives it clients."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message

from unsloth_multigpu.errors import FederatedError, SetupError
from unsloth_multigpu.federated.placement import SlotDevice, choose_client, slot_environment
from unsloth_multigpu.federated.round_report import ClientRecord
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.child import Child, read_tail
from unsloth_multigpu.wire.folder import make_log

logger = get_logger(__name__)

# Flower's error codes of SuperNodes; their names are in flwr.common.constant, which is not public.
CLIENT_RAISED, REPLY_UNAVAILABLE, CLIENT_CRASHED = 2, 4, 8
# Attempts of a client whose process dies.
_MAX_ATTEMPTS = 2
_POLL_S = 0.2
# With the sys.path of this process, to import the user's modules and this package.
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[3])
from unsloth_multigpu.federated.client_worker import main
main()"""


class SlotPool:
    """Runs tasks. One call at a time.

    Args:
        app: A ClientApp, pickled by cloudpickle.
        slots: The slots, ordered by `Slot.index`.
        placement: See `placement.choose_client`.
        seed: See `slot_environment`.
    """

    def __init__(self, app: bytes, slots: Sequence[Slot], placement: str, seed: int) -> None:
        self.slots = slots
        self._app = app
        self._placement = placement
        self._seed = seed
        self._lock = threading.Lock()
        self._waiting: list[Task] = []
        # Seconds of each client's last run, by the kind of message and client_id.
        self._seconds: dict[tuple[str, int], float] = {}
        self._is_over = False

    def run(self, tasks: Sequence[Task], limit_s: float | None = None) -> None:
        """Runs tasks until each has a reply. Tasks without one after the limit end with an error.

        Raises:
            FederatedError: No slot can be started any more.
            SetupError: A slot cannot load the app.
        """
        end_s = None if limit_s is None else time.monotonic() + limit_s
        self._waiting, self._is_over = list(tasks), False
        try:
            while self._waiting and not self._is_over:
                self._serve_all(end_s)
        except BaseException:
            self.close()
            raise
        for task in tasks:
            if task.reply is None:
                what = "ended" if task.record.attempts else "begun"
                logger.warning("%s", task.fail(REPLY_UNAVAILABLE, f"not {what} within round_timeout_s"))

    def close(self) -> None:
        """Ends all processes and drops the tasks. A later `run` starts new processes."""
        self._waiting.clear()
        for slot in self.slots:
            slot.end()
            slot.is_retired = False

    def _serve_all(self, end_s: float | None) -> None:
        """Runs the slots' threads until no task waits, or until the limit."""
        slots = [slot for slot in self.slots if not slot.is_retired]
        with ThreadPoolExecutor(len(slots)) as threads:
            futures = [threads.submit(self._serve, slot) for slot in slots]
            try:
                rest_s = None if end_s is None else max(0.0, end_s - time.monotonic())
                done, late = wait(futures, rest_s, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                self._is_over = bool(late)
            except BaseException:
                self._is_over = True
                raise
            finally:
                while busy := [slot for slot, future in zip(slots, futures, strict=True) if not future.done()]:
                    for slot in busy:
                        slot.kill("the round has ended")
                    wait(futures, _POLL_S)

    def _serve(self, slot: Slot) -> None:
        """Target of a slot's thread."""
        while not (self._is_over or slot.is_retired) and (task := self._take(slot)):
            self._run(slot, task)

    def _take(self, slot: Slot) -> Task | None:
        """Removes and returns the next task for a slot, None without one."""
        with self._lock:
            if not self._waiting:
                return None
            devices = list(dict.fromkeys(other.device for other in self.slots if not other.is_retired))
            ids = [task.record.client_id for task in self._waiting]
            seconds = {i: s for (kind, i), s in self._seconds.items() if kind == self._waiting[0].record.kind}
            chosen = choose_client(ids, devices.index(slot.device), len(devices), self._placement, seconds)
            return None if chosen is None else self._waiting.pop(chosen)

    def _run(self, slot: Slot, task: Task) -> None:
        while task.reply is None:
            try:
                slot.start(self._app, slot_environment(slot.device, len(self.slots), self._seed, os.environ))
            except SlotEnded as ended:
                self._retire(slot, task, str(ended))
                return
            task.begin(slot)
            try:
                self._finish(task, *slot.call(task.message, task.context))
            except SlotEnded as ended:
                if self._is_over:
                    return
                self._try_again(slot, task, str(ended))

    def _finish(self, task: Task, kind: str, result: Any, more: Any) -> None:
        """Ends a task with the result of `client_worker.run_client`."""
        if kind == "failed":
            task.fail(CLIENT_RAISED, result)
            logger.warning("%s failed:\n%s", task.place(), more.rstrip())
            return
        task.answer(result)
        task.record.peak_memory_bytes = more
        with self._lock:
            self._seconds[task.record.kind, task.record.client_id] = task.record.seconds

    def _try_again(self, slot: Slot, task: Task, end: str) -> None:
        """Called when a client's process has died. Leaves the task for another attempt, or ends it with an error."""
        if task.record.attempts < _MAX_ATTEMPTS:
            text = "%s. It was running %s, which is run once more. The end of its log:\n%s"
            logger.warning(text, end, task.place(), read_tail(slot.log))
            return
        text = f"{end}. This is the second process that ended with this client, which is left out"
        error = task.fail(CLIENT_CRASHED, text)
        logger.warning("%s\nThe end of the log of slot %d:\n%s", error, slot.index, read_tail(slot.log))

    def _retire(self, slot: Slot, task: Task, end: str) -> None:
        """Called when a process has ended before it was ready."""
        if self._is_over:
            return
        with self._lock:
            slot.is_retired = True
            self._waiting.insert(0, task)
        log = f"The end of its log:\n{read_tail(slot.log)}"
        if all(other.is_retired for other in self.slots):
            raise FederatedError(f"No slot is left: {end}, before it was ready. {log}", hint=f"See {slot.log}.")
        logger.warning("%s, before it was ready: other slots run its clients. %s", end, log)


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

    Args:
        device: The only device that its processes see.
        log_dir: Folder of slot_N.log.

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

        Raises:
            SlotEnded: It has ended, for example because its device does not work.
            SetupError: It cannot load the app.
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

        Raises:
            SlotEnded: The process has ended, or was killed because it is unusable.
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
