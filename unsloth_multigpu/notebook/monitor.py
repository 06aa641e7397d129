"""Watches the workers of a notebook in a thread of the kernel, and acts on faults while a cell runs."""

from __future__ import annotations

import copy
import functools
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import DistributedError, DivergenceError, RankTimeoutError
from unsloth_multigpu.launch.watchdog import find_hang
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.notebook.judge import DIVERGED_AFTER_S, Action, find_divergence, next_actions
from unsloth_multigpu.notebook.kernel import Cell, Kernel, WorkerProcess, died, strike
from unsloth_multigpu.notebook.recovery import abort_group
from unsloth_multigpu.train.lead import Preemption
from unsloth_multigpu.wire.heartbeat import Heartbeat, read_beats
from unsloth_multigpu.wire.stack import main_frames, place_of, read_stacks

logger = get_logger(__name__)

# The monitor sends it to the main thread, where its handler raises the error.
RAISE_SIGNAL = signal.SIGUSR1
_POLL_MS = 50
# A second Stop within this time is ignored.
_AGAIN_S = 2.0
_LOOK_S = 0.2
_SIGNAL_S = 0.05
_STACK_LIMIT_S = 2.0
_KILLED_BECAUSE = "it did not leave the cell"


class Monitor:
    """The thread that watches. The main thread opens and closes it.

    It reads signals from Python's wake-up descriptor (`signal.set_wakeup_fd`), so it sees them even while the main
    thread is inside a collective. `run_dir` has the heartbeats.
    """

    def __init__(self, kernel: Kernel, run_dir: Path, hang_timeout_s: float) -> None:
        self._kernel = kernel
        self._run_dir = run_dir
        self._hang_timeout_s = hang_timeout_s
        self._looked_s = 0.0
        self._signalled_s = 0.0
        self._is_closing = False
        self._main_thread = threading.get_ident()
        with ExitStack() as stack:
            self._read_end, self._write_end = os.pipe()
            for end in (self._read_end, self._write_end):
                os.set_blocking(end, False)
                stack.callback(os.close, end)
            self._wakeup_before = -1
            self._own_signals()
            stack.callback(self._give_signals_back)
            stack.callback(signal.signal, RAISE_SIGNAL, signal.signal(RAISE_SIGNAL, self._raise_pending))
            self._thread = threading.Thread(target=self._run, name="unsloth_multigpu-monitor", daemon=True)
            self._thread.start()
            stack.callback(self._end_thread)
            self._stack = stack.pop_all()
        kernel.attend = self.attend
        # This cannot be unregistered, so it gets a weak reference.
        os.register_at_fork(after_in_child=functools.partial(_leave_signals, weakref.ref(self)))

    def close(self) -> None:
        """Ends the thread and restores the signals."""
        self._kernel.attend = lambda: None
        self._stack.close()

    def attend(self) -> None:
        """Wakes the thread. Called by the main thread when a cell begins or ends."""
        self._own_signals()  # Another library may have replaced the wake-up descriptor.
        self._wake()

    def _own_signals(self) -> None:
        before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if before != self._write_end:
            self._wakeup_before = before

    def _give_signals_back(self) -> None:
        now = signal.set_wakeup_fd(-1)
        # A descriptor that other code has set meanwhile is kept. The earlier one may be closed.
        with suppress(OSError, ValueError):
            signal.set_wakeup_fd(self._wakeup_before if now == self._write_end else now)

    def _end_thread(self) -> None:
        self._is_closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # A full pipe wakes the thread, too.
            os.write(self._write_end, b"\0")

    def _raise_pending(self, _signal_number: int, _frame: object) -> None:
        cell = self._kernel.cell
        if cell is None or cell.pending_error is None or (self._kernel.is_undisturbed and not cell.makes_group):
            return  # The signal is sent again.
        error, cell.pending_error = cell.pending_error, None
        # While the main thread writes its traceback, an error would end IPython's own code.
        if cell.main == "runs":
            strike(cell.task, error)

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            # Without this thread no cell would end, so the kernel continues alone.
            for worker in self._kernel.workers:
                worker.kill(f"the kernel's monitor has failed ({type(error).__name__}: {error})")
                worker.collect()
            raise

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        ends = {}
        for worker in self._kernel.workers:
            for descriptor in (worker.channel.fileno(), worker.pid_descriptor):
                poll.register(descriptor, select.POLLIN)
                ends[descriptor] = worker
        while not self._is_closing:
            for descriptor, _ in poll.poll(_POLL_MS if self._kernel.cell is not None else None):
                if descriptor == self._read_end:
                    self._take_signals(os.read(descriptor, 4096))
                elif not self._receive(ends[descriptor], descriptor):
                    poll.unregister(descriptor)
            cell = self._kernel.cell
            if cell is not None:
                self._look(cell)
                self._step(cell)

    def _take_signals(self, signal_numbers: bytes) -> None:
        others = signal_numbers.replace(b"\0", b"")
        if self._wakeup_before >= 0 and others:
            with suppress(OSError):  # Full or closed.
                os.write(self._wakeup_before, others)
        cell, now_s = self._kernel.cell, time.monotonic()
        if signal.SIGINT not in signal_numbers or cell is None or cell.stop_s is not None:
            return
        # A training handles Stop itself, to end on all ranks after the same step.
        is_taken = isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), Preemption)
        if cell.taken_stop_s is None and is_taken:
            cell.taken_stop_s = now_s
            logger.info("Stop: the training ends after this step. A second Stop ends it now, and the model is lost")
        elif cell.taken_stop_s is None or now_s - cell.taken_stop_s > _AGAIN_S:
            cell.stop_s = now_s
            if cell.taken_stop_s is not None:  # The training's handler is installed, so Python does not raise.
                cell.is_stop_missed = True

    def _receive(self, worker: WorkerProcess, descriptor: int) -> bool:
        """Reads the messages of a worker. Returns False if no more will come from this descriptor."""
        kernel = self._kernel
        messages = worker.channel.receive() if descriptor == worker.channel.fileno() else None
        if messages is None and worker.exit_code is None:
            worker.collect()
            if (cell := kernel.cell) is not None:
                cell.fail("died", died(worker))
        with kernel.changed:
            for message in messages or ():
                self._take(worker, message)
            kernel.changed.notify_all()
        return messages is not None

    def _take(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        kind, cell = message["kind"], self._kernel.cell
        if kind == "ready":
            worker.is_ready = True
        elif kind == "waits":
            if cell is not None and cell.number == message["cell_number"]:
                worker.waits = message["collective"]
        elif kind == "ended":
            worker.waits = None
            is_own = message["error"] and not message["is_asked"] and not message["is_left_alone"]
            if cell is not None and cell.number == message["cell_number"] and is_own and cell.stop_s is None:
                cell.fail("raised", _raised(worker, message))
            worker.ended[message["cell_number"]] = dict(message)

    def _step(self, cell: Cell) -> None:
        """Takes the actions that are due now."""
        now_s = time.monotonic()
        # A copy, because the main thread changes the cell meanwhile.
        for action in next_actions(copy.copy(cell), now_s, self._kernel.pending()):
            logger.debug("cell=%d %s", cell.number, action.value)
            cell.done[action] = time.monotonic()
            self._act(cell, action)
        # Sent repeatedly, because the handler raises nothing while the main thread is undisturbed.
        if cell.pending_error is not None and cell.main == "runs" and now_s - self._signalled_s > _SIGNAL_S:
            self._signalled_s = now_s
            signal.pthread_kill(self._main_thread, RAISE_SIGNAL)

    def _act(self, cell: Cell, action: Action) -> None:
        kernel = self._kernel
        if action == Action.PASS_STOP:
            kernel.send("interrupt", cell_number=cell.number, is_stop=True)
        elif action == Action.ASK:
            kernel.send("interrupt", cell_number=cell.number, is_stop=False)
        elif action == Action.ASK_ABORT:
            kernel.send("abort", cell_number=cell.number, pids=kernel.pids)
        elif action == Action.KILL:
            for worker in kernel.workers:
                if worker.rank in kernel.pending():
                    worker.kill(_KILLED_BECAUSE)
        elif action == Action.ABORT:
            abort_group(kernel.pids)
        else:
            cell.pending_error = cell.failure_error or KeyboardInterrupt()

    def _look(self, cell: Cell) -> None:
        """Looks for divergence and hangs, which workers do not report."""
        if cell.failure is not None or cell.stop_s is not None or time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s, beats = time.monotonic(), read_beats(self._run_dir)
        self._look_for_divergence(cell, beats)
        self._look_for_hang(cell, beats)

    def _look_for_divergence(self, cell: Cell, beats: Mapping[int, Heartbeat]) -> None:
        ended, running = {}, {}
        for worker in self._kernel.workers:
            message, beat = worker.ended.get(cell.number), beats.get(worker.rank)
            if message is not None and not message["error"]:
                ended[worker.rank] = message["collective"]
            elif worker.waits is not None:
                ended[worker.rank] = worker.waits
            elif message is None and beat is not None and beat.alive_s > cell.begin_s:
                running[worker.rank] = beat.collective  # Written since the cell began, so it belongs to this group.
        text = find_divergence(cell.main, self._kernel.last_collective(), ended, running, len(self._kernel.workers))
        if text is None:
            cell.diverged_since_s = None
        elif cell.diverged_since_s is None:
            cell.diverged_since_s = time.monotonic()
        elif time.monotonic() - cell.diverged_since_s > DIVERGED_AFTER_S:
            cell.fail("diverged", DivergenceError(f"{text}.", hint="Let all ranks run the same code in a cell."))

    def _look_for_hang(self, cell: Cell, beats: Mapping[int, Heartbeat]) -> None:
        hang = find_hang(beats, time.monotonic(), self._hang_timeout_s, since_s=cell.begin_s)
        if hang is None:
            return
        pids = {} if hang.rank is None else {hang.rank: self._kernel.pids[hang.rank]}
        place = place_of(main_frames("".join(read_stacks(self._run_dir, pids, _STACK_LIMIT_S).values())))
        error = RankTimeoutError(
            f"{hang.message}{f' ({place})' if place else ''}.",
            hint=f"If the rank was only slow, raise hang_timeout_s={self._hang_timeout_s:g}.",
        )
        cell.fail("hung", error)


def _leave_signals(monitor: weakref.ref[Monitor]) -> None:
    """Called in a forked child: a signal of the child is none of the kernel."""
    if monitor() is not None:
        signal.set_wakeup_fd(-1)


def _raised(worker: WorkerProcess, message: Mapping[str, Any]) -> DistributedError:
    is_name = message["error"].startswith("NameError")
    why = "If rank 0 has that name, code that only rank 0 runs has defined it: define it in a cell. " if is_name else ""
    return DistributedError(
        f"rank {worker.rank} raised {message['error']}\n\nTraceback of rank {worker.rank}:\n{message['traceback']}",
        hint=f"{why}All output of rank {worker.rank}: {worker.log}",
    )
