"""Watches the workers of a notebook in a thread of the kernel, and acts on Stop and on failures of a cell."""

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
from unsloth_multigpu.notebook.kernel import Cell, Kernel, WorkerProcess, death_error, raise_or_cancel
from unsloth_multigpu.notebook.recovery import abort_group
from unsloth_multigpu.train.lead import Preemption
from unsloth_multigpu.wire.heartbeat import Heartbeat, read_beats
from unsloth_multigpu.wire.stack import main_frames, place_of, read_stacks

logger = get_logger(__name__)

# Sent to a main thread, whose handler of the signal raises the error that ends the cell.
RAISE_SIGNAL = signal.SIGUSR1
_POLL_MS = 50
# A second Stop within this time is ignored in a training that handles the first one.
_AGAIN_S = 2.0
_LOOK_S = 0.2
_SIGNAL_S = 0.05
_STACK_LIMIT_S = 2.0
_KILLED_BECAUSE = "it did not leave the cell"


class Monitor:
    """The thread that watches. The main thread opens and closes it.

    It reads signals from a pipe that Python writes to (`signal.set_wakeup_fd`), so it sees them even while the main
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
            self._install_wakeup_fd()
            stack.callback(self._restore_wakeup_fd)
            stack.callback(signal.signal, RAISE_SIGNAL, signal.signal(RAISE_SIGNAL, self._raise_pending))
            self._thread = threading.Thread(target=self._run, name="unsloth_multigpu-monitor", daemon=True)
            self._thread.start()
            stack.callback(self._end_thread)
            self._stack = stack.pop_all()
        kernel.wake_monitor = self.wake
        # A weak reference, because this cannot be unregistered.
        os.register_at_fork(after_in_child=functools.partial(_drop_wakeup_fd, weakref.ref(self)))

    def close(self) -> None:
        """Ends the thread and restores the signals."""
        self._kernel.wake_monitor = lambda: None
        self._stack.close()

    def wake(self) -> None:
        """Wakes the thread. Called by the main thread when a cell begins or ends."""
        self._install_wakeup_fd()  # Another library may have replaced the wake-up descriptor.
        self._write_wakeup()

    def _install_wakeup_fd(self) -> None:
        before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if before != self._write_end:
            self._wakeup_before = before

    def _restore_wakeup_fd(self) -> None:
        now = signal.set_wakeup_fd(-1)
        # A descriptor that other code has set meanwhile stays. The one before ours may be closed by now.
        with suppress(OSError, ValueError):
            signal.set_wakeup_fd(self._wakeup_before if now == self._write_end else now)

    def _end_thread(self) -> None:
        self._is_closing = True
        self._write_wakeup()
        self._thread.join()

    def _write_wakeup(self) -> None:
        with suppress(BlockingIOError):  # A full pipe has already woken the thread.
            os.write(self._write_end, b"\0")

    def _raise_pending(self, _signal_number: int, _frame: object) -> None:
        cell = self._kernel.cell
        if cell is None or cell.pending_error is None or (self._kernel.is_uninterruptible and not cell.makes_group):
            return  # If an error is pending, the monitor sends the signal again.
        error, cell.pending_error = cell.pending_error, None
        # While an error is shown, another one would end IPython's own code.
        if cell.main_state == "runs":
            raise_or_cancel(cell.task, error)

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            # Without this thread no cell would end. Without workers the kernel continues alone.
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
            with suppress(OSError):  # The pipe is full or closed.
                os.write(self._wakeup_before, others)
        cell, now_s = self._kernel.cell, time.monotonic()
        if signal.SIGINT not in signal_numbers or cell is None or cell.stop_s is not None:
            return
        # A training of a sharded model handles Stop itself: all ranks end after the same step.
        is_taken = isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), Preemption)
        if cell.taken_stop_s is None and is_taken:
            cell.taken_stop_s = now_s
            logger.info("Stop: the training ends after this step. A second Stop ends it at once, and the model is lost")
        elif cell.taken_stop_s is None or now_s - cell.taken_stop_s > _AGAIN_S:
            cell.stop_s = now_s
            if cell.taken_stop_s is not None:  # The training's handler is installed, so Python does not raise.
                cell.is_stop_missed = True

    def _receive(self, worker: WorkerProcess, descriptor: int) -> bool:
        """Reads the messages of a worker, or its end. Returns False if the descriptor has nothing more to read."""
        kernel = self._kernel
        messages = worker.channel.receive() if descriptor == worker.channel.fileno() else None
        if messages is None and worker.exit_code is None:
            worker.collect()
            if (cell := kernel.cell) is not None:
                cell.fail("died", death_error(worker))
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
                cell.fail("raised", _worker_error(worker, message))
            worker.ended[message["cell_number"]] = dict(message)

    def _step(self, cell: Cell) -> None:
        """Takes the actions that are due now."""
        now_s = time.monotonic()
        # A copy, because the main thread may change the cell meanwhile.
        for action in next_actions(copy.copy(cell), now_s, self._kernel.pending()):
            logger.debug("cell=%d %s", cell.number, action.value)
            cell.done[action] = time.monotonic()
            self._act(cell, action)
        # Sent repeatedly, because the handler raises nothing while the main thread is uninterruptible.
        if cell.pending_error is not None and cell.main_state == "runs" and now_s - self._signalled_s > _SIGNAL_S:
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
        kernel, ended, running = self._kernel, {}, {}
        for worker in kernel.workers:
            message, beat = worker.ended.get(cell.number), beats.get(worker.rank)
            if message is not None and not message["error"]:
                ended[worker.rank] = message["collective"]
            elif worker.waits is not None:
                ended[worker.rank] = worker.waits
            elif message is None and beat is not None and beat.alive_s > cell.begin_s:
                running[worker.rank] = beat.collective  # Written since the cell began, so it counts in this group.
        text = find_divergence(cell.main_state, kernel.last_collective(), ended, running, len(kernel.workers))
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


def _drop_wakeup_fd(monitor: weakref.ref[Monitor]) -> None:
    """Called in a forked child, whose signals do not concern the kernel."""
    if monitor() is not None:
        signal.set_wakeup_fd(-1)


def _worker_error(worker: WorkerProcess, message: Mapping[str, Any]) -> DistributedError:
    is_name = message["error"].startswith("NameError")
    why = "If rank 0 has that name, code that only rank 0 runs has defined it: define it in a cell. " if is_name else ""
    return DistributedError(
        f"rank {worker.rank} raised {message['error']}\n\nTraceback of rank {worker.rank}:\n{message['traceback']}",
        hint=f"{why}All output of rank {worker.rank}: {worker.log}",
    )
