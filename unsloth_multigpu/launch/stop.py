"""What the supervisor does when it is told to stop: lets the ranks save, and ends them when their time is over."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.launch.cause import where
from unsloth_multigpu.logs import tell
from unsloth_multigpu.wire.event import Event
from unsloth_multigpu.wire.heartbeat import Phase, read_beats
from unsloth_multigpu.wire.request import REPEAT_S, StopRequest, ask_to_stop, read_request

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# A script may handle what ends it at once, but not for longer.
_END_LIMIT_S = 30.0


class Signals:
    """Owns the supervisor's signals while it is open. A handler only notes what came: nothing is interrupted.

    A signal that was ignored when this process began (nohup, a job in the background) stays ignored.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._received: deque[tuple[int, float]] = deque()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: h for n in SIGNALS if (h := signal.getsignal(n)) != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, lambda number, _frame: self._received.append((number, time.monotonic())))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def take(self) -> tuple[int, float] | None:
        """The oldest signal that was not taken yet, and when it came; None where there is none."""
        return self._received.popleft() if self._received else None


class Stop:
    """Decides what signals mean for the ranks.

    The first SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 while a rank is inside `train()` asks the ranks to save and to stop.
    The second signal, a signal while no rank trains, and the end of `grace_s` stop them at once. So does SIGHUP: the
    terminal to which rank 0 writes is gone then.

    Args:
        signals: What has come.
        run_dir: The run's private folder.
        num_ranks: Ranks of this machine.
        grace_s: How long the ranks may take to save and to leave, in seconds. 0 = the first signal ends them.

    Attributes:
        signal_number: The signal that asked to stop, 0 = none.
        how: "saved" = the ranks were to stop by themselves, "late" = they did not within `grace_s`, "at once".
    """

    def __init__(self, signals: Signals, run_dir: Path, num_ranks: int, grace_s: float) -> None:
        self._signals = signals
        self._run_dir = run_dir
        self._num_ranks = num_ranks
        self._grace_s = grace_s
        self._attempt = 0
        self._first_s = 0.0
        self._is_sent = False
        self.signal_number = 0
        self.how = "saved"

    def begin_attempt(self, attempt: int) -> None:
        """The ranks are started next; what was asked of those before them is over."""
        self._attempt = attempt

    def is_asked(self) -> bool:
        """Called while no rank runs: True once a signal has come, now or while they ran."""
        if not self.signal_number and (received := self._signals.take()) is not None:
            self.signal_number, self.how = received[0], "at once"
        return self.signal_number != 0

    def turn(self, events: Sequence[Event]) -> signal.Signals | None:
        """Called some ten times a second while ranks run.

        Args:
            events: All ranks' events of this attempt, oldest first.

        Returns:
            What to send to the ranks now, None = nothing.
        """
        while (received := self._signals.take()) is not None:
            if not self.signal_number:
                self._begin(*received, events)
            elif received[1] - self._first_s > REPEAT_S:
                self.how, self._is_sent = "at once", True
                return signal.SIGKILL
        now_s, request = time.monotonic(), read_request(self._run_dir, self._attempt)
        if not self.signal_number and request is not None:
            # A rank was told of it by another node.
            self.signal_number, self._first_s = request.signal_number, now_s
        if not self.signal_number:
            return None
        started = _ranks_of(events, "started")
        if self.how == "saved":
            # After a KeyboardInterrupt in train() of all ranks, the script decides what it does then.
            is_script_at_work = self.signal_number == signal.SIGINT and started == _ranks_of(events, "stopped")
            if (request is not None and now_s <= request.deadline_s) or is_script_at_work:
                return None
            # A rank may be stuck, be stopped, or handle SIGTERM itself.
            self.how, self._is_sent = "late", True
            return signal.SIGKILL
        if self._is_sent:
            return signal.SIGKILL if self.how == "late" or now_s - self._first_s > _END_LIMIT_S else None
        self._is_sent = True
        # Scripts may catch Ctrl-C, so it arrives as SIGINT. Ranks must not take other signals for a Ctrl-C. One that
        # has not reached the line would print where its imports were.
        is_interrupt = self.signal_number == signal.SIGINT and len(started) == self._num_ranks
        return signal.SIGINT if is_interrupt else signal.SIGTERM

    def _begin(self, signal_number: int, time_s: float, events: Sequence[Event]) -> None:
        self.signal_number, self._first_s = signal_number, time_s
        # The page of an earlier rank is still there until the new rank's script reaches the line and makes its own.
        started = _ranks_of(events, "started")
        is_outside = all(b.phase is Phase.SCRIPT for r, b in read_beats(self._run_dir).items() if r in started)
        if not self._grace_s or is_outside or signal_number == signal.SIGHUP:
            self.how = "at once"
            return
        ask_to_stop(self._run_dir, self._attempt, StopRequest(signal_number, time_s + self._grace_s))
        name = signal.Signals(signal_number).name
        tell(
            f"\nunsloth_multigpu: {name}: the ranks finish their step, save and stop, within {self._grace_s:g} s "
            "(grace_s). A second signal stops them at once.\n"
        )


def _ranks_of(events: Sequence[Event], kind: str) -> set[int]:
    return {event.rank for event in events if event.kind == kind}


def describe_stop(stop: Stop, events: Sequence[Event], step: int, grace_s: float, resume: str) -> str:
    """One or two sentences: where the ranks stopped, what is saved, how to resume.

    Args:
        events: All ranks' events of the last attempt, oldest first.
        step: The last finished step, -1 before the first training.
        grace_s: The ranks' limit.
        resume: The option.
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
        resumes = "The same command resumes" if resume == "auto" else "With resume='auto' the same command resumes"
        return f"{text} {resumes} from {saved[-1]}."
    return f"{text} Nothing was saved." if has_stopped or stop.how == "late" else text
