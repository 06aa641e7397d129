"""What the supervisor does when it is told to stop: lets the ranks save, and ends them when their time is over."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from unsloth_multigpu.errors import ConfigError, PatchError, SetupError, VersionError
from unsloth_multigpu.launch.cause import where
from unsloth_multigpu.logs import tell
from unsloth_multigpu.wire.beat import Phase, read_beats
from unsloth_multigpu.wire.event import Event, read_events
from unsloth_multigpu.wire.process import kill_children, kill_rank
from unsloth_multigpu.wire.request import REPEAT_S, StopRequest, ask_to_stop, read_request

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# The engine asks every 0.1 s while ranks run. If it has not asked for this long, it is closing them or waits for nodes.
_QUIET_S = 1.0
# What starting the processes of the ranks may take at most; without another node it takes milliseconds.
_START_LIMIT_S = 5.0
# Failures that would repeat at each start. The meaning of a script's own exit codes is not known, so those failures are
# tried again, as max_restarts asks.
_PERMANENT = frozenset(error.exit_code for error in (ConfigError, SetupError, VersionError, PatchError))


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Gives the signals back to those that had them, at the end."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {signal_number: signal.getsignal(signal_number) for signal_number in SIGNALS}
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, signal.SIG_DFL if handler is None else handler)


class RestartRefused(Exception):
    """Starting the ranks again would end the same way."""


class Stop:
    """Owns the supervisor's signals while ranks run, and until `handlers_kept` gives them back.

    The first SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 while a rank is inside `train()` asks the ranks to save and to stop.
    The second signal, a signal while no rank trains, and the end of `grace_s` stop them at once. So does SIGHUP: the
    terminal to which rank 0 writes is gone then. A signal that was ignored when this process began (nohup, a job in the
    background) stays ignored.

    Args:
        run_dir: The run's private folder.
        num_ranks: Ranks of this machine.
        grace_s: How long the ranks may take to save and to leave, in seconds. 0 = the first signal ends them.
        end: Raises what ends the engine. It passes the given signal on to the ranks.

    Attributes:
        signal_number: The signal that asked to stop, 0 = none.
        how: "saved" = the ranks were to stop by themselves, "late" = they did not within `grace_s`, "at once".
    """

    def __init__(
        self, run_dir: Path, num_ranks: int, grace_s: float, end: Callable[[signal.Signals], NoReturn]
    ) -> None:
        self._run_dir = run_dir
        self._num_ranks = num_ranks
        self._grace_s = grace_s
        self._end = end
        self._before: dict[signal.Signals, Any] = {}
        self._received: list[tuple[int, float]] = []
        self._first_s = 0.0
        self._turn_s = 0.0
        self._attempt = 0
        self._start_s: float | None = None
        self._is_over = False
        self._has_ended = False
        self.signal_number = 0
        self.how = "saved"

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {signal_number: signal.getsignal(signal_number) for signal_number in SIGNALS}
        # What comes before `begin` is looked at there: nobody would handle the exception earlier.
        self._start_s = time.monotonic()
        self._own_signals()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.rest()

    def rest(self) -> None:
        """The ranks have ended. Signals change nothing any more: what is left, telling why and tidying up, is short."""
        self._has_ended = True

    def is_asked(self) -> bool:
        """True once a signal has come to this process, or to another node."""
        if self._received and not self.signal_number:
            # It came while the engine was between two starts or was closing the ranks, so no rank was asked.
            self.signal_number, self.how = self._received[0][0], "at once"
        return self.signal_number != 0

    def begin(self) -> None:
        """Called when the exception of a signal is handled. From then on it also ends the wait for other nodes."""
        self._start_s = None
        if self.is_asked():
            self._end_at_once(self.signal_number)

    def begin_round(self, attempt: int) -> None:
        """Called before each start of the ranks; `attempt` = how often they were started before.

        Raises:
            RestartRefused: The ranks were to stop, or failed by what a restart cannot cure.
        """
        # The nodes meet next, which may take long. No rank runs, and the engine does not ask.
        self._turn_s = 0.0
        if self.is_asked():
            raise RestartRefused(f"no restart after {signal.Signals(self.signal_number).name}")
        if any(_is_permanent(event) for event in read_events(self._run_dir, attempt - 1)):
            raise RestartRefused("no restart: the ranks would fail the same way")
        self._attempt = attempt

    def begin_start(self) -> None:
        """Called when the nodes have met: the processes of the ranks are started next. A signal waits for the first
        turn, because the engine forgets processes that it was starting when an exception came.
        """
        self._start_s = time.monotonic()

    def turn(self) -> None:
        """Called every 0.1 s by the engine's thread while the ranks run; acts on what was received."""
        self._own_signals()
        self._start_s = None
        self._turn_s = time.monotonic()
        while self._received:
            signal_number, time_s = self._received.pop(0)
            if not self.signal_number:
                self._begin(signal_number, time_s)
            elif time_s - self._first_s > REPEAT_S:
                self._end_now("at once")
        request = read_request(self._run_dir, self._attempt)
        if request is None:
            return
        if not self.signal_number:
            # A rank was told of it by another node.
            self.signal_number, self._first_s = request.signal_number, self._turn_s
        if self._turn_s > request.deadline_s and not self._is_script_at_work():
            self._end_now("late")

    def _is_script_at_work(self) -> bool:
        """True where all ranks have left `train()` by a KeyboardInterrupt: the script decides what it does then."""
        events = read_events(self._run_dir, self._attempt)
        kinds = {kind: {e.rank for e in events if e.kind == kind} for kind in ("started", "stopped")}
        return self.signal_number == signal.SIGINT and kinds["started"] == kinds["stopped"]

    def _own_signals(self) -> None:
        # Older versions of torch elastic install their own handlers each time they start ranks.
        for signal_number, before in self._before.items():
            wanted = signal.SIG_IGN if before == signal.SIG_IGN else self._receive
            if signal.getsignal(signal_number) != wanted:
                signal.signal(signal_number, wanted)

    def _receive(self, signal_number: int, _frame: object) -> None:
        now_s = time.monotonic()
        if self._has_ended:
            return
        if self._is_over:
            # The engine is closing the ranks, and gives each half a minute.
            if now_s - self._first_s > REPEAT_S:
                self._kill_started()
            return
        is_starting = self._start_s is not None and now_s - self._start_s < _START_LIMIT_S
        if not is_starting and now_s - self._turn_s > _QUIET_S:
            self._first_s = now_s
            self._end_at_once(signal_number)
        self._received.append((signal_number, now_s))

    def _begin(self, signal_number: int, time_s: float) -> None:
        self.signal_number, self._first_s = signal_number, time_s
        # The page of an earlier rank is still there until the new rank's script reaches the line and makes its own.
        started = {e.rank for e in read_events(self._run_dir, self._attempt) if e.kind == "started"}
        beats = read_beats(self._run_dir)
        is_outside = all(b.phase is Phase.SCRIPT for r, b in beats.items() if r in started)
        if not self._grace_s or is_outside or signal_number == signal.SIGHUP:
            self._end_at_once(signal_number)
        ask_to_stop(self._run_dir, self._attempt, StopRequest(int(signal_number), time_s + self._grace_s))
        name = signal.Signals(signal_number).name
        tell(
            f"\nunsloth_multigpu: {name}: the ranks finish their step, save and stop, within {self._grace_s:g} s "
            "(grace_s). A second signal stops them at once.\n"
        )

    def _end_at_once(self, signal_number: int) -> NoReturn:
        self.signal_number, self.how, self._is_over = self.signal_number or signal_number, "at once", True
        # Scripts may catch Ctrl-C, so it arrives as SIGINT. Ranks must not take other signals for a Ctrl-C. One that
        # has not reached the line would print where its imports were.
        have_begun = len(self._started()) == self._num_ranks
        self._end(signal.SIGINT if signal_number == signal.SIGINT and have_begun else signal.SIGTERM)

    def _end_now(self, how: str) -> NoReturn:
        self.how, self._is_over = how, True
        # A rank may be stuck, be stopped, or handle SIGTERM itself: the engine would wait half a minute for it.
        self._kill_started()
        self._end(signal.SIGTERM)

    def _started(self) -> dict[int, int]:
        """Process ids of the ranks that have reached the line."""
        events = read_events(self._run_dir, self._attempt)
        return {event.rank: int(event.facts["pid"]) for event in events if event.kind == "started"}

    def _kill_started(self) -> None:
        for pid in self._started().values():
            kill_rank(pid)
        self.kill_forgotten()

    def kill_forgotten(self) -> None:
        """SIGKILL to ranks that have not reached the line, of which the engine may know nothing."""
        kill_children(str(self._run_dir))


def describe_stop(stop: Stop, events: Sequence[Event], step: int, grace_s: float, resume: str) -> str:
    """One or two sentences: where the ranks stopped, what is saved, how to resume.

    Args:
        events: All ranks' events of the last attempt, oldest first.
        step: The last finished step, -1 before the first training.
        grace_s: The ranks' limit.
        resume: The option.
    """
    name = signal.Signals(stop.signal_number).name
    place = where(step)
    saved = [str(event.facts["checkpoint"]) for event in events if event.facts.get("checkpoint")]
    way = "The same command resumes" if resume == "auto" else "With resume='auto' the same command resumes"
    rest = f" {way} from {saved[-1]}." if saved else " Nothing was saved."
    if any(event.kind == "stopped" for event in events):
        return f"stopped by {name}{place}.{rest}"
    if stop.how == "late":
        return f"stopped by {name}: the ranks did not stop within grace_s={grace_s:g} s and were ended{place}.{rest}"
    how = "all ranks were ended at once" if stop.how == "at once" else "all ranks have ended"
    return f"stopped by {name}{place}: {how}.{rest if saved else ''}"


def _is_permanent(event: Event) -> bool:
    return event.kind == "exception" and event.facts.get("exit_code") in _PERMANENT
