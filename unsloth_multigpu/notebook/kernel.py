"""The workers of a notebook's kernel, their channel, and the cell that runs on all ranks."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from unsloth_multigpu.accelerator import CPU_BACKEND
from unsloth_multigpu.errors import DistributedError, DivergenceError, LaunchError, MultiGPUError
from unsloth_multigpu.notebook.judge import Action, FailureKind, MainState
from unsloth_multigpu.options import ENV_NOTEBOOK
from unsloth_multigpu.wire.child import Child

_WAIT_S = 0.05
# A worker that reads no message for this long is killed: its thread always reads, unless native code holds the GIL.
_SEND_LIMIT_S = 30.0
# The kernel's sys.path finds this package, also if a cell has added its folder.
_PROGRAM = f"""import json, os, sys
sys.path[:] = json.loads(os.environ["{ENV_NOTEBOOK}"])["path"]
from unsloth_multigpu.notebook.worker import main
main()"""
# The hint of errors after which there are no workers.
ALONE = (
    "This kernel continues alone and keeps its model, unless shard='on' has sharded it. Save the model. To train on "
    "all ranks, restart the kernel."
)
# Parts of error messages of torch, gloo and NCCL after another rank has ended or the group was aborted.
_BROKEN = ("Connection closed by peer", "Connection reset", CPU_BACKEND, "NCCL", "ProcessGroup", "process group")
_ERROR_CHARACTERS = 2000


@dataclass
class Cell:
    """What all ranks run together: a cell, or the opening of a new process group between two cells.

    Attributes:
        number: Counts what the ranks have run, from 1. Not the number that the notebook shows.
        task: asyncio task of an async cell; None for other cells.
        makes_group: It opens a new process group, and runs no code of the user.
        main_state: State of the kernel's main thread: it runs the cell, shows its error, or has left the cell.
        main_state_since_s: When `main_state` changed; after an error, when it began to show the error.
        error: Error of the cell in the kernel.
        stop_s: When the user pressed Stop.
        taken_stop_s: When the user pressed Stop in a training that handles it: all ranks end after the same step.
        is_stop_missed: Stop was pressed while Python could not raise KeyboardInterrupt in the cell.
        failure: Kind of the first failure of another rank; None = none.
        failure_s: When the failure was noticed.
        failure_error: The error that describes the failure.
        pending_error: The error to raise in the kernel's main thread.
        is_shown: `failure_error` was shown to the user.
        is_partial: %%rank has run code on some ranks only.
        done: Actions that the kernel has taken, and when.
    """

    number: int
    task: asyncio.Task[Any] | None = None
    makes_group: bool = False
    begin_s: float = field(default_factory=time.monotonic)
    main_state: MainState = "runs"
    main_state_since_s: float = field(default_factory=time.monotonic)
    error: BaseException | None = None
    stop_s: float | None = None
    taken_stop_s: float | None = None
    is_stop_missed: bool = False
    failure: FailureKind | None = None
    failure_s: float = 0.0
    failure_error: MultiGPUError | None = None
    pending_error: BaseException | None = None
    is_shown: bool = False
    is_partial: bool = False
    diverged_since_s: float | None = None
    done: dict[Action, float] = field(default_factory=dict)

    def enter(self, main_state: MainState) -> None:
        """Sets the state of the kernel's main thread."""
        if self.main_state != "unwinds":  # After an error, the time when it was first shown counts.
            self.main_state_since_s = time.monotonic()
        self.main_state = main_state

    def fail(self, kind: FailureKind, error: MultiGPUError) -> None:
        """Records a failure of another rank, if it is the first one."""
        if self.failure is None:
            self.failure_error, self.failure_s = error, time.monotonic()
            self.failure = kind


class Kernel:
    """The kernel as rank 0: its workers and the current cell. The main thread runs cells, and `Monitor` watches them.

    `workers` are the ranks above 0, in order. `last_collective` returns the number of the last collective that this
    process has begun.

    Attributes:
        changed: Notified by the monitor when a worker has sent a message or has ended.
        wake_monitor: Set by the monitor. Called when a cell begins or ends.
        is_uninterruptible: No error may be raised in the main thread now.
        is_broken: After the last cell the ranks may differ, or the process group may be unusable.
    """

    def __init__(self, workers: Sequence[WorkerProcess], last_collective: Callable[[], int]) -> None:
        self.workers = workers
        self.last_collective = last_collective
        self.cell: Cell | None = None
        self.changed = threading.Condition()
        self.wake_monitor: Callable[[], None] = lambda: None
        self.is_uninterruptible = False
        self.is_broken = False
        # With the process id, because a forked child has the same thread ids.
        self._main_thread = os.getpid(), threading.get_ident()
        self._cell_numbers = itertools.count(1)

    @property
    def current(self) -> Cell | None:
        """The current cell in the thread that runs it; None in other threads and in a forked child."""
        return self.cell if self._is_main_thread() else None

    def _is_main_thread(self) -> bool:
        return self._main_thread == (os.getpid(), threading.get_ident())

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks, in order."""
        return [os.getpid(), *(worker.pid for worker in self.workers)]

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message to all workers."""
        with self.uninterruptible():
            for worker in self.workers:
                worker.send(kind, **fields)

    @contextmanager
    def uninterruptible(self) -> Iterator[None]:
        """Within the context neither Stop nor the monitor raises in the main thread. The monitor records Stop."""
        if not self._is_main_thread() or self.is_uninterruptible:
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        try:
            self.is_uninterruptible = True
            signal.signal(signal.SIGINT, self._note_stop)
            yield
        finally:
            # In this order, so that an error between the two cannot leave Stop without effect.
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
            finally:
                self.is_uninterruptible = False

    def _note_stop(self, _signal_number: int, _frame: object) -> None:
        if self.cell is not None and self.cell.main_state == "runs":
            self.cell.is_stop_missed = True

    def wait_for(self, condition: Callable[[WorkerProcess], bool], what: str, limit_s: float) -> None:
        """Waits until every worker meets a condition. `what` describes the wait in messages.

        Raises DistributedError if a worker has ended, LaunchError if one needs longer than `limit_s`.
        """
        deadline_s = time.monotonic() + limit_s
        with self.changed:
            while not all(condition(worker) for worker in self.workers):
                for worker in self.workers:
                    if worker.exit_code is not None:
                        raise DistributedError(f"While {what}: {worker.describe_death()}", hint="Restart the kernel.")
                if time.monotonic() > deadline_s:
                    late = [w.rank for w in self.workers if not condition(w)]
                    raise LaunchError(
                        f"{what} took rank(s) {late} longer than {limit_s:g} seconds.",
                        hint=f"See the log {self.workers[late[0] - 1].log}, and restart the kernel.",
                    )
                self.changed.wait(_WAIT_S)

    def replay(self, source: str, limit_s: float, *, execution_count: int = 0, has_line: bool = False) -> None:
        """Runs code on the workers only. With `has_line` they stop at `enable_multi_gpu()` in it.

        Raises DistributedError if the code failed on a worker.
        """
        cell_number = next(self._cell_numbers)
        for worker in self.workers:
            worker.is_ready = not has_line
        fields = {"source": source, "execution_count": execution_count, "has_line": has_line}
        self.send("cell", cell_number=cell_number, **fields)
        what = "running an earlier cell again"
        self.wait_for(lambda w: cell_number in w.ended or (has_line and w.is_ready), what, limit_s)
        for worker in self.workers:
            message = worker.ended.get(cell_number)
            if message is not None and (message["error"] or has_line):
                unreached = "a cell, not in a callback or behind a condition"
                place = "the first cell, and restart the kernel" if message["error"] else unreached
                raise DistributedError(
                    f"Code from before enable_multi_gpu() failed on rank {worker.rank}: "
                    f"{message['error'] or 'it has not reached that call.'}\n"
                    f"{source.strip()[:500]}\n{message['traceback']}",
                    hint=f"Call enable_multi_gpu() in {place}.",
                )

    def begin(
        self,
        source: str,
        random_state: Mapping[str, Any],
        task: asyncio.Task[Any] | None = None,
        *,
        execution_count: int = 0,
    ) -> Cell:
        """Begins a cell on all workers. `finish` ends it.

        `source` is the cell as the user wrote it, `random_state` the state of rank 0's random generators, `task` the
        asyncio task of an async cell, and `execution_count` the cell's number in the notebook.
        """
        message = {"source": source, "execution_count": execution_count, "random_state": dict(random_state)}
        return self._begin(Cell(next(self._cell_numbers), task), "cell", {**message, "folder": _folder()})

    def begin_group(self, order: Mapping[str, Any]) -> Cell:
        """Tells the workers to open a new process group. `finish` waits until they have done so."""
        return self._begin(Cell(next(self._cell_numbers), makes_group=True), "open", order)

    def _begin(self, cell: Cell, kind: str, fields: Mapping[str, Any]) -> Cell:
        with self.uninterruptible():
            for worker in self.workers:
                worker.waits = None
                worker.ended.clear()
                if worker.exit_code is not None:  # It ended between two cells.
                    cell.fail("died", death_error(worker))
            self.cell = cell
            self.send(kind, cell_number=cell.number, **fields)
            self.wake_monitor()
        return cell

    def finish(self, error: BaseException | None) -> BaseException | None:
        """Ends the cell on all ranks, after it has ended in the kernel with `error`.

        Returns the error to show instead of `error`; None = `error` stands.
        """
        cell = self.cell
        assert cell is not None
        with self.uninterruptible():
            cell.error = error
            cell.enter("left")
            self.send("left", cell_number=cell.number)
            self.wake_monitor()
            with self.changed:
                while self.pending():
                    self.changed.wait(_WAIT_S)
            self.cell = None
        shown, messages = self._outcome(cell), self._messages(cell)
        counts = {message.get("collective") for message in messages} | {self.last_collective()}
        is_interrupted = any((cell.done, cell.stop_s, len(counts) > 1, error is not None and names_broken_group(error)))
        is_common = [message["error"] for message in messages] == [error_text(error)] * len(self.workers)
        self.is_broken = is_interrupted or (cell.failure is not None and not cell.is_partial and not is_common)
        return shown

    def pending(self) -> frozenset[int]:
        """Returns the ranks of the living workers that have not ended the cell."""
        cell = self.cell
        if cell is None:
            return frozenset()
        return frozenset(w.rank for w in self.workers if w.exit_code is None and cell.number not in w.ended)

    def _outcome(self, cell: Cell) -> BaseException | None:
        messages = self._messages(cell)
        dead = [w for w in self.workers if w.exit_code is not None]
        if dead:
            return death_error(dead[0])
        is_consequence = cell.error is None or names_broken_group(cell.error)
        if cell.stop_s is not None:
            return KeyboardInterrupt("Stop was pressed.") if is_consequence else None
        if isinstance(cell.error, asyncio.CancelledError):
            return cell.failure_error
        if cell.failure_error is not None and not isinstance(cell.error, MultiGPUError):
            kinds = {message["error"].partition(":")[0] for message in messages}
            # Show rank 0's error if all ranks raise the same one, or if rank 0 raised it first.
            is_common = cell.error is not None and kinds == {type(cell.error).__name__}
            is_first = not is_consequence and cell.main_state_since_s < cell.failure_s
            return None if is_common or is_first else cell.failure_error
        return None if cell.error is not None else self._divergence(messages)

    def _messages(self, cell: Cell) -> list[dict[str, Any]]:
        return [worker.ended[cell.number] for worker in self.workers if cell.number in worker.ended]

    def _divergence(self, messages: Sequence[Mapping[str, Any]]) -> DivergenceError | None:
        hint = "Let all ranks run the same code in a cell."
        alone = [message["error"] for message in messages if message["is_left_alone"]]
        if alone:
            why = alone[0].partition(": ")[2].partition("\nHint:")[0]
            text = f"Another rank waits for a value that rank 0 has not computed: {why}"
            return DivergenceError(text, hint=hint)
        collectives = {self.last_collective(), *(message["collective"] for message in messages)}
        if len(collectives) == 1:
            return None
        text = f"The ranks have called different numbers of collectives in this cell: {sorted(collectives)}."
        return DivergenceError(text, hint=hint)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # The folder has been removed.
        return ""


class WorkerProcess(Child):
    """The process of a rank above 0, which is started here, and its latest messages.

    Attributes:
        is_ready: It accepts cells.
        ended: Its message about the end of a cell, by the number of the cell. Emptied when a cell begins.
        waits: While it waits for a value of rank 0, the number of its last collective; None = it does not wait.
    """

    def __init__(self, rank: int, log: Path, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.is_ready = False
        self.ended: dict[int, dict[str, Any]] = {}
        self.waits: int | None = None
        super().__init__(f"rank {rank}", _PROGRAM, log, environment)
        self.channel = Channel(self.connection, _SEND_LIMIT_S)

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message, and kills the process if it does not read it."""
        if self.exit_code is not None:
            return
        try:
            self.channel.send(kind, **fields)
        except BlockingIOError:
            self.kill(f"it has read nothing for {_SEND_LIMIT_S:g} seconds")
        except OSError:
            self.kill()  # The process is ending.

    def close(self, limit_s: float = 0.0) -> None:
        """Asks the process to end, and kills it after `limit_s`; see `Child.close`."""
        if self.exit_code is None and self.is_mine():
            with suppress(OSError):
                self.channel.send("exit")
            self.has_ended(limit_s)
        super().close()


def raise_or_cancel(task: asyncio.Task[Any] | None, error: BaseException) -> None:
    """Ends a cell from its own thread: raises `error`, or cancels the cell's task if another task runs now."""
    if task is None or asyncio.current_task(task.get_loop()) is task:
        raise error from None
    task.get_loop().call_soon_threadsafe(task.cancel)


def death_error(worker: WorkerProcess) -> DistributedError:
    """Returns the error about a worker that has ended."""
    return DistributedError(worker.describe_death(), hint=ALONE)


class Channel:
    """One end of a socket pair, over which kernel and worker exchange JSON messages. No pickle.

    Any thread may send; one thread receives. Sending may wait `send_limit_s` for the reader; None = no limit.
    """

    def __init__(self, end: Connection, send_limit_s: float | None = None) -> None:
        self._end = end
        self._lock = threading.Lock()
        self.fileno = end.fileno
        if send_limit_s is not None:
            with socket.socket(fileno=os.dup(end.fileno())) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(send_limit_s), 0))

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message: its kind, and fields that JSON can hold.

        Raises BlockingIOError if the other side does not read: part of the message may have been sent, so the channel
        is unusable then. Raises OSError if the other side is gone.
        """
        with self._lock:
            self._end.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for a message and returns all that have arrived; None if the other side is gone."""
        messages: list[dict[str, Any]] = []
        try:
            while not messages or self._end.poll():
                messages.append(json.loads(self._end.recv_bytes()))
        except (EOFError, OSError):
            return messages or None
        return messages


def error_text(error: BaseException | None) -> str:
    """Formats an error for messages between ranks; "" = no error. An error that reports one of rank 0 becomes that."""
    if error is None:
        return ""
    return (getattr(error, "of_rank_0", "") or f"{type(error).__name__}: {error}")[:_ERROR_CHARACTERS]


def names_broken_group(error: BaseException) -> bool:
    """True for an error that may be a consequence of another rank's error."""
    return any(text in f"{type(error).__name__} {error}" for text in _BROKEN)
