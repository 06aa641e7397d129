"""The kernel's side of a notebook on several ranks: cells begin and end on all of them together."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from unsloth_multigpu.errors import DistributedError, DivergenceError, LaunchError, MultiGPUError
from unsloth_multigpu.notebook.cell import error_text, names_broken_group
from unsloth_multigpu.notebook.judge import Action, Kind, Main
from unsloth_multigpu.notebook.worker_process import WorkerProcess, died

_WAIT_S = 0.05


@dataclass
class Cell:
    """What all ranks run together: a cell, or the making of a new process group between two cells.

    Attributes:
        number: Counts the cells and groups that are sent to the workers.
        task: The task of a cell that awaits; None if it does not.
        makes_group: A new group is made; no code of the user runs.
        main: What the kernel's main thread does: runs the cell, writes its traceback, or has left the cell.
        main_since_s: Since when; what it left by an error it left when it began to write the traceback.
        error: What the kernel's own part ended with, or is ending.
        stop_s: When the user pressed Stop.
        taken_stop_s: The same where a training ends by itself then, on all ranks after the same step.
        is_stop_missed: Stop came at a moment when nothing may be raised.
        failure: Kind of the first fault of another rank; None = none.
        failure_s: When it was noticed.
        failure_error: The error that tells the user of it.
        is_shown: `failure_error` has been shown to the user.
        is_of_some: It has run code on some ranks only, as %%rank asks.
        done: When the kernel took each action.
    """

    number: int
    task: asyncio.Task[Any] | None = None
    makes_group: bool = False
    begin_s: float = field(default_factory=time.monotonic)
    main: Main = "runs"
    main_since_s: float = field(default_factory=time.monotonic)
    error: BaseException | None = None
    stop_s: float | None = None
    taken_stop_s: float | None = None
    is_stop_missed: bool = False
    failure: Kind | None = None
    failure_s: float = 0.0
    failure_error: MultiGPUError | None = None
    is_shown: bool = False
    is_of_some: bool = False
    diverged_since_s: float | None = None
    done: dict[Action, float] = field(default_factory=dict)

    def enter(self, main: Main) -> None:
        """Notes what the main thread of the kernel does from now on."""
        if self.main != "unwinds":  # Else it left the cell when it began to write its traceback.
            self.main_since_s = time.monotonic()
        self.main = main

    def fail(self, kind: Kind, error: MultiGPUError) -> None:
        """Records the first fault of another rank."""
        if self.failure is None:
            self.failure_error, self.failure_s = error, time.monotonic()
            self.failure = kind

    def is_elsewhere(self) -> bool:
        """True for a cell that awaits, if the calling main thread is in the event loop or in another task."""
        return self.task is not None and asyncio.current_task(self.task.get_loop()) is not self.task

    def cancel(self) -> None:
        """Cancels a cell that awaits. Any thread may call it."""
        if self.task is not None:
            self.task.get_loop().call_soon_threadsafe(self.task.cancel)


class Kernel:
    """Workers and the cell that runs on them. The main thread begins and ends cells, `Monitor` watches.

    Args:
        workers: The ranks above 0, in order.
        last_collective: Number of the last collective that this process has begun.

    Attributes:
        changed: Notified by the monitor when a worker has sent something or has ended.
        attend: Set by the monitor: makes it look at once, because a cell begins or ends.
        is_undisturbed: No error may be raised in the main thread now.
        is_broken: After the last cell the state of the process group, or of some ranks, is unknown.
    """

    def __init__(self, workers: Sequence[WorkerProcess], last_collective: Callable[[], int]) -> None:
        self.workers = workers
        self.last_collective = last_collective
        self.cell: Cell | None = None
        self.changed = threading.Condition()
        self.attend: Callable[[], None] = lambda: None
        self.is_undisturbed = False
        self.is_broken = False
        self._main_thread = threading.get_ident()
        self._num_cells = 0

    @property
    def current(self) -> Cell | None:
        """The cell that runs, for the thread that runs it; None for any other thread, and in a forked child."""
        return self.cell if threading.get_ident() == self._main_thread else None

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks, in order."""
        return [os.getpid(), *(worker.pid for worker in self.workers)]

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message to all workers."""
        with self.undisturbed():
            for worker in self.workers:
                worker.send(kind, **fields)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, neither Stop nor the monitor raises in the main thread. The monitor still sees Stop."""
        if threading.get_ident() != self._main_thread or self.is_undisturbed:
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        try:
            self.is_undisturbed = True
            signal.signal(signal.SIGINT, self._note_stop)
            yield
        finally:
            # In this order: what is raised between the two must not leave Stop without effect.
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
            finally:
                self.is_undisturbed = False

    def _note_stop(self, _signal_number: int, _frame: object) -> None:
        if self.cell is not None and self.cell.main == "runs":
            self.cell.is_stop_missed = True

    def wait_until_ready(self, limit_s: float) -> None:
        """Waits until every worker is ready for messages.

        Raises:
            DistributedError: A worker has ended.
            LaunchError: It takes longer than `limit_s`.
        """
        self._wait_for(lambda worker: worker.is_ready, "starting the workers", limit_s)

    def _wait_for(self, condition: Callable[[WorkerProcess], bool], what: str, limit_s: float) -> None:
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

    def wait_until_gone(self, limit_s: float) -> None:
        """Waits until the monitor has seen the end of every worker."""
        with self.changed:
            self.changed.wait_for(lambda: all(w.exit_code is not None for w in self.workers), limit_s)

    def replay(self, source: str, limit_s: float, *, execution_count: int = 0) -> None:
        """Runs code on the workers only, not on rank 0.

        Raises:
            DistributedError: It failed there.
        """
        cell_number = self._next_cell_number()
        self.send("cell", cell_number=cell_number, source=source, execution_count=execution_count)
        self._wait_for(lambda worker: cell_number in worker.ended, "running an earlier cell again", limit_s)
        for worker in self.workers:
            message = worker.ended[cell_number]
            if message["error"]:
                raise DistributedError(
                    f"Code from before enable_multi_gpu() failed on rank {worker.rank}: {message['error']}\n"
                    f"{source.strip()[:500]}\n{message['traceback']}",
                    hint="Call enable_multi_gpu() in the first cell, and restart the kernel.",
                )

    def begin(
        self,
        source: str,
        random_state: Mapping[str, Any],
        task: asyncio.Task[Any] | None = None,
        *,
        execution_count: int = 0,
    ) -> Cell:
        """Begins a cell on all workers; `finish` ends it.

        Args:
            source: As the user wrote it.
            random_state: The state that the workers' generators get.
            task: Of a cell that awaits.
            execution_count: The cell's number in the notebook.
        """
        message = {"source": source, "execution_count": execution_count, "random_state": dict(random_state)}
        return self._begin(Cell(self._next_cell_number(), task), "cell", {**message, "folder": _folder()})

    def begin_group(self, order: Mapping[str, Any]) -> Cell:
        """Lets the workers make a new process group, as `order` says; `finish` ends it."""
        return self._begin(Cell(self._next_cell_number(), makes_group=True), "open", order)

    def _begin(self, cell: Cell, kind: str, fields: Mapping[str, Any]) -> Cell:
        with self.undisturbed():
            for worker in self.workers:
                worker.waits = None
                worker.ended.clear()
                if worker.exit_code is not None:  # It has ended between two cells.
                    cell.fail("died", died(worker))
            self.cell = cell
            self.send(kind, cell_number=cell.number, **fields)
            self.attend()
        return cell

    def finish(self, error: BaseException | None) -> BaseException | None:
        """Ends the cell on all ranks, after the kernel's own part has ended with `error`.

        Returns:
            What to show the user instead of `error`; None = show `error`.
        """
        cell = self.cell
        assert cell is not None
        with self.undisturbed():
            cell.error = error
            cell.enter("left")
            self.send("left", cell_number=cell.number)
            self.attend()
            with self.changed:
                while self.pending():
                    self.changed.wait(_WAIT_S)
            self.cell = None
        told, messages = self._outcome(cell), self._messages(cell)
        collectives = {message.get("collective") for message in messages} | {self.last_collective()}
        is_cut = any((cell.done, cell.stop_s, len(collectives) > 1, error is not None and names_broken_group(error)))
        is_common = [message["error"] for message in messages] == [error_text(error)] * len(self.workers)
        self.is_broken = is_cut or (cell.failure is not None and not cell.is_of_some and not is_common)
        return told

    def pending(self) -> frozenset[int]:
        """Workers that are alive and have not ended the cell."""
        cell = self.cell
        if cell is None:
            return frozenset()
        return frozenset(w.rank for w in self.workers if w.exit_code is None and cell.number not in w.ended)

    def forget(self) -> None:
        """For a forked child: the workers and the cell belong to the kernel, not to the child."""
        for worker in self.workers:
            worker.close()
        self.workers, self.cell = (), None

    def _outcome(self, cell: Cell) -> BaseException | None:
        messages = self._messages(cell)
        dead = [w for w in self.workers if w.exit_code is not None]
        if dead:
            return died(dead[0])
        is_echo = cell.error is None or names_broken_group(cell.error)
        if cell.stop_s is not None:
            return KeyboardInterrupt("Stop was pressed.") if is_echo else None
        if isinstance(cell.error, asyncio.CancelledError):
            return cell.failure_error
        if cell.failure_error is not None and not isinstance(cell.error, MultiGPUError):
            kinds = {message["error"].partition(":")[0] for message in messages}
            # An error that all ranks raise is the user's own: rank 0's is shown. So is what rank 0 raised first.
            is_common = cell.error is not None and kinds == {type(cell.error).__name__}
            is_first = not is_echo and cell.main_since_s < cell.failure_s
            return None if is_common or is_first else cell.failure_error
        return None if cell.error is not None else self._divergence(messages)

    def _messages(self, cell: Cell) -> list[dict[str, Any]]:
        return [worker.ended[cell.number] for worker in self.workers if cell.number in worker.ended]

    def _divergence(self, messages: Sequence[Mapping[str, Any]]) -> DivergenceError | None:
        hint = "Let all ranks take the same way through the cell."
        alone = [message["error"] for message in messages if message["is_left_alone"]]
        if alone:
            why = alone[0].partition(": ")[2].partition("\nHint:")[0]
            text = f"Another rank has come to something that rank 0 makes for all, and rank 0 has not: {why}"
            return DivergenceError(text, hint=hint)
        collectives = {self.last_collective(), *(message["collective"] for message in messages)}
        if len(collectives) == 1:
            return None
        text = f"The ranks have made different numbers of collectives in this cell: {sorted(collectives)}."
        return DivergenceError(text, hint=hint)

    def _next_cell_number(self) -> int:
        self._num_cells += 1
        return self._num_cells


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # The folder has been removed.
        return ""
