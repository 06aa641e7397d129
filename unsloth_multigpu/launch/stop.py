"""Stops the ranks after a signal to the supervisor: lets them save, and ends them after `grace_s`."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unsloth_multigpu.launch.cause import where
from unsloth_multigpu.logs import tell
from unsloth_multigpu.wire.event import REPEAT_S, Event, StopRequest, ask_to_stop, read_request
from unsloth_multigpu.wire.heartbeat import Phase, read_beats
from unsloth_multigpu.wire.process import signals_handled

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# How long a script may handle the signal that ends it at once.
_END_LIMIT_S = 30.0

# Signals that the supervisor has received, with their times, oldest first.
Received = deque[tuple[int, float]]


@contextmanager
def signals_queued() -> Iterator[Received]:
    """Queues the supervisor's signals within its context. Nothing is interrupted."""
    received: Received = deque()
    with signals_handled(SIGNALS, lambda number, _frame: received.append((number, time.monotonic()))):
        yield received


class Stop:
    """Decides what to do with the ranks after a signal.

    The first SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 while a rank is inside `train()` asks the ranks to save and stop.
    A second signal, a signal while no rank trains, and the end of `grace_s` end them at once. So does SIGHUP, because
    rank 0 has lost its terminal. With `grace_s` of 0 the first signal ends them.

    Attributes:
        signal_number: The signal that stops the run, 0 = none.
        how: "saved" = the ranks were asked to save and exit, "late" = they did not within `grace_s`, "at once".
    """

    def __init__(self, signals: Received, run_dir: Path, num_ranks: int, grace_s: float) -> None:
        self._signals = signals
        self._run_dir = run_dir
        self._num_ranks = num_ranks
        self._grace_s = grace_s
        self._first_s = 0.0
        self._is_sent = False
        self.signal_number = 0
        self.how = "saved"

    def is_asked(self) -> bool:
        """True once a signal has come. Called while no rank runs."""
        if not self.signal_number and self._signals:
            self.signal_number, self.how = self._signals.popleft()[0], "at once"
        return self.signal_number != 0

    def poll(self, events: Sequence[Event]) -> signal.Signals | None:
        """Called about ten times a second while ranks run. Returns the signal to send to the ranks now, or None."""
        while self._signals:
            number, time_s = self._signals.popleft()
            if not self.signal_number:
                self._begin(number, time_s, events)
            elif time_s - self._first_s > REPEAT_S:
                self.how, self._is_sent = "at once", True
                return signal.SIGKILL
        now_s, request = time.monotonic(), read_request(self._run_dir)
        if not self.signal_number and request is not None:
            # Another node received a signal, and its ranks have told a rank of this node.
            self.signal_number, self._first_s = request.signal_number, now_s
        if not self.signal_number:
            return None
        started = _ranks_of(events, "started")
        if self.how == "saved":
            # After a KeyboardInterrupt in train() of all ranks, the script may go on as long as it likes.
            is_script_at_work = self.signal_number == signal.SIGINT and started == _ranks_of(events, "stopped")
            if (request is not None and now_s <= request.deadline_s) or is_script_at_work:
                return None
            # SIGKILL, because a rank may hang, be suspended, or handle SIGTERM itself.
            self.how, self._is_sent = "late", True
            return signal.SIGKILL
        if self._is_sent:
            return signal.SIGKILL if self.how == "late" or now_s - self._first_s > _END_LIMIT_S else None
        self._is_sent = True
        # Scripts may catch Ctrl-C, so it is sent as SIGINT, other signals as SIGTERM. Before enable_multi_gpu() a rank
        # would print the traceback of its imports.
        is_interrupt = self.signal_number == signal.SIGINT and len(started) == self._num_ranks
        return signal.SIGINT if is_interrupt else signal.SIGTERM

    def _begin(self, signal_number: int, time_s: float, events: Sequence[Event]) -> None:
        self.signal_number, self._first_s = signal_number, time_s
        # Until a rank has called enable_multi_gpu(), its page is that of the attempt before.
        started = _ranks_of(events, "started")
        is_outside = all(b.phase is Phase.SCRIPT for r, b in read_beats(self._run_dir).items() if r in started)
        if not self._grace_s or is_outside or signal_number == signal.SIGHUP:
            self.how = "at once"
            return
        ask_to_stop(self._run_dir, StopRequest(signal_number, time_s + self._grace_s))
        name = signal.Signals(signal_number).name
        tell(
            f"\nunsloth_multigpu: {name}: the ranks finish their step, save and stop, within {self._grace_s:g} s "
            "(grace_s). A second signal stops them at once.\n"
        )


def how_to_resume(checkpoint: str, resume: str) -> str:
    """Describes how to continue from a complete checkpoint, given the option `resume`."""
    if resume == "auto":
        return f"The same command resumes from {checkpoint}."
    return f"To resume from {checkpoint}, put UNSLOTH_MULTIGPU_RESUME=auto before the same command."


def _ranks_of(events: Sequence[Event], kind: str) -> set[int]:
    return {event.rank for event in events if event.kind == kind}


def describe_stop(stop: Stop, events: Sequence[Event], step: int, grace_s: float, resume: str) -> str:
    """Describes, in one or two sentences, where the ranks stopped, what was saved and how to resume.

    `step` is the last finished one, -1 before the first training.
    """
    how = {
        "saved": "all ranks have ended",
        "late": f"the ranks did not stop within grace_s={grace_s:g} s and were ended",
        "at once": "all ranks were ended at once",
    }[stop.how]
    has_stopped = any(event.kind == "stopped" for event in events)
    text = f"stopped by {signal.Signals(stop.signal_number).name}{where(step)}{'' if has_stopped else f': {how}'}."
    saved = [str(event.facts["checkpoint"]) for event in events if event.facts.get("checkpoint")]
    if saved:
        return f"{text} {how_to_resume(saved[-1], resume)}"
    return f"{text} Nothing was saved." if has_stopped or stop.how == "late" else text
