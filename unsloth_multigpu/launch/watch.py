"""Sees what torch elastic cannot: ranks that hang, one that left with exit code 0, one whose teardown hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import psutil

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch.cause import HANG, STOPS, Cause, Memory, find_cause, find_early_exit
from unsloth_multigpu.launch.nodes import is_one_node
from unsloth_multigpu.launch.watchdog import Hang, find_hang
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.beat import Beat, Node, read_beats
from unsloth_multigpu.wire.event import Event, read_events
from unsloth_multigpu.wire.process import (
    count_memory_kills,
    is_alive,
    kill_rank,
    read_held_bytes,
    read_state,
    send_signal,
    send_to_main_thread,
    wait_for_exit,
)
from unsloth_multigpu.wire.stack import is_written, main_frames, place_of, stack_path

logger = get_logger(__name__)

POLL_S = 0.1
# Ranks leave a training together, but not at the same instant.
_EARLY_EXIT_GRACE_S = 2.0
# After an error Python still joins threads and runs exit handlers; a process group may block that forever.
TEARDOWN_LIMIT_S = 3.0
# A longer time between two looks means that this process or its machine was stopped, and perhaps the ranks too.
_PAUSE_S = 5.0
_STACK_LIMIT_S = 5.0
_STACK_POLL_S = 0.01
_NUM_FRAMES = 8


class Watch:
    """Follows the ranks' events and pages in a thread, and ends ranks that would wait forever.

    Args:
        run_dir: The run's private folder.
        on_restart: Called with why the ranks are started again, and the number of the new attempt.
        log_dir: Where stacks of a hang are kept.
        num_ranks: Ranks of this node.
        config: The run's options.
    """

    def __init__(
        self,
        run_dir: Path,
        on_restart: Callable[[Cause, int], None],
        *,
        log_dir: Path,
        num_ranks: int,
        config: MultiGPUConfig,
    ) -> None:
        self._run_dir = run_dir
        self._on_restart = on_restart
        self._log_dir = log_dir
        self._num_ranks = num_ranks
        self._hang_timeout_s = config.hang_timeout_s
        self._is_one_node = is_one_node(config)
        self._stop = threading.Event()
        # Of what is known of an attempt: the thread and the engine's thread both go on to the next one.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="unsloth_multigpu-watch", daemon=True)
        self._num_kills_before = count_memory_kills()
        self._held_bytes: dict[int, int] = {}
        self._beats: dict[int, Beat] = {}
        self._own_beats: dict[int, Beat] = {}
        self._others: Sequence[Node] = ()
        self._failure: BaseException | None = None
        self._last_look_s = time.monotonic()
        self._round = self._next_round = 0
        self._begin_attempt(0)

    def _begin_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        self._since_s = self._last_look_s
        self._ending_since_s: float | None = None
        self._is_told_to_end = False
        self.is_told = False
        self._hang: Event | None = None
        # By process id, because a thread of the previous attempt may be late.
        self._exit_codes: dict[int, int | None] = {}
        self._pids: dict[int, int] = {}
        self.gone: set[int] = set()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread; `cause` and `events` stay usable."""
        self._stop.set()
        self._thread.join()

    @property
    def has_failed(self) -> bool:
        """True once the thread has ended by an error. `cause` and `events` may fail in the same way then."""
        return self._failure is not None

    def check(self) -> None:
        """Called by the engine's thread while the ranks run.

        Raises:
            LaunchError: The thread has ended by an error. The ranks would run on, and no hang would be noticed.
        """
        if self._failure is not None:
            reason = f"{type(self._failure).__name__}: {self._failure}"
            raise LaunchError(
                f"The supervisor can no longer watch its ranks, so it ended them ({reason}).",
                hint=f"If something deleted files in {self._run_dir}, exempt this folder from clean-up; else report "
                "the traceback.",
            ) from self._failure

    def hear(self, others: Sequence[Node]) -> Mapping[int, Beat]:
        """Takes what is known of the other nodes of this round. May be called in any thread.

        Returns:
            The latest beats of this node's ranks; empty unless all of them run.
        """
        self._others = others
        return self._own_beats

    def begin_round(self, attempt: int) -> None:
        """Called before the nodes meet, which may take long: why they meet again is reported at once."""
        with self._lock:
            events = self.events()  # First: of this round, although the thread may not have seen it yet.
            self._next_round = attempt
            if self.is_told or (self._is_one_node and self._hang is None):
                return  # On one node the next events come soon, and with them all that is known.
            cause = self._find_cause(events, self._own_exit_codes())
            # Without the text of an error, more may be known later.
            if self._hang is not None or (cause.traceback and not {e.kind for e in events} & {*STOPS}):
                self.is_told = True
                self._on_restart(cause, attempt)

    def begin_start(self) -> None:
        """Called when the nodes have met: the ranks of the round are started next."""
        self._round = self._next_round

    def events(self) -> list[Event]:
        """Events of the latest attempt."""
        with self._lock:
            # Ranks of an attempt may all have died before the line, and left no event.
            later = range(self._attempt + 1, self._round + 1)
            while (begun := next((n for n in later if read_events(self._run_dir, n)), None)) is not None:
                self._go_to(begun)
                later = range(begun + 1, self._round + 1)
            return self._read_events()

    def _go_to(self, attempt: int) -> None:
        if not self.is_told:
            self._on_restart(self._find_cause(self._read_events(), self._own_exit_codes()), attempt)
        self._begin_attempt(attempt)

    def cause(self, exit_codes: Mapping[int, int]) -> Cause:
        """Why the latest attempt ended; see `find_cause`."""
        with self._lock:
            events = self.events()
            if self._attempt < self._round:  # No rank of the latest attempt has reached the line.
                self._go_to(self._round)
                events = self._read_events()
        if not self.gone:
            self._beats = read_beats(self._run_dir)
        return self._find_cause(events, {**self._own_exit_codes(), **exit_codes})

    def _find_cause(self, events: list[Event], exit_codes: Mapping[int, int]) -> Cause:
        memory = Memory(count_memory_kills() - self._num_kills_before, self._held_bytes)
        return find_cause(
            events,
            exit_codes,
            self.gone,
            self._beats if events else {},  # Else the pages are those of an earlier attempt.
            memory=memory,
            is_one_node=self._is_one_node,
            num_ranks=self._num_ranks,
        )

    def _own_exit_codes(self) -> dict[int, int]:
        """Of the ranks that ended before any other was stopped; torch elastic tells codes only when the run is over."""
        codes = {rank: self._exit_codes.get(self._pids.get(rank, 0)) for rank in self.gone}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _follow(self, pid: int) -> None:
        self._exit_codes[pid] = wait_for_exit(pid)

    def _read_events(self) -> list[Event]:
        events = read_events(self._run_dir, self._attempt)
        return events if self._hang is None else [*events, self._hang]

    def _run(self) -> None:
        try:
            self._follow_ranks()
        except BaseException as error:
            # Whatever the error is: if only this thread ended by it, the run would go on without hang detection, and
            # nothing would say so. The engine's thread raises it in `check` and ends the run; here Python reports it.
            self._failure = error
            raise

    def _follow_ranks(self) -> None:
        while not self._stop.wait(POLL_S):
            events = self.events()
            if not self.gone:
                self._beats = read_beats(self._run_dir)
            pids = self._pids = {e.rank: int(e.facts["pid"]) for e in events if e.kind == "started"}
            for pid in set(pids.values()) - self._exit_codes.keys():
                self._exit_codes[pid] = None
                threading.Thread(target=self._follow, args=(pid,), daemon=True).start()
            alive = {r for r, pid in pids.items() if is_alive(pid)}
            if len(alive) == len(pids):
                self.gone = set()
                self._held_bytes = {r: read_held_bytes(pid) for r, pid in pids.items()}
            elif not self.gone and not self._is_told_to_end:
                self.gone = set(pids) - alive
            self._end_hang(events, pids)
            self._end_stuck_teardown(events, pids, alive)
            self._end_waiting(events, pids, alive)

    def _end_hang(self, events: list[Event], pids: dict[int, int]) -> None:
        now_s = time.monotonic()
        if now_s - self._last_look_s > _PAUSE_S:
            self._since_s = now_s
        self._last_look_s = now_s
        is_ending = {e.kind for e in events} & {HANG, "exception", *STOPS}
        if is_ending or self.gone or len(pids) < self._num_ranks:
            self._own_beats = {}
            return
        self._own_beats = {r: b for r, b in self._beats.items() if r in pids}
        if self._find_hang(now_s) is None:
            return
        # A page may be read while it is written, and then mixes two moments. A real hang is there at the next look too.
        time.sleep(POLL_S)
        beats = read_beats(self._run_dir)
        self._own_beats = {r: b for r, b in beats.items() if r in pids}
        hang = self._find_hang(time.monotonic())
        if hang is None:
            return
        facts = self._describe(hang, self._collect_stacks(pids))
        # A rank of another node is ended by its own supervisor. Here only the message counts.
        guilty = [r for r in pids if r == hang.rank]
        self._hang = Event(HANG, guilty[0] if guilty else -1, self._attempt, now_s, hang.step, facts)
        # The engine sees that a rank has ended, and ends the others.
        for victim in guilty or pids:
            kill_rank(pids[victim])

    def _find_hang(self, now_s: float) -> Hang | None:
        return find_hang(self._own_beats, now_s, self._hang_timeout_s, since_s=self._since_s, others=self._others)

    def _collect_stacks(self, pids: dict[int, int]) -> dict[int, str]:
        """Every rank's stacks, which are kept in the log folder as well; "" for one that writes none."""
        paths = {rank: stack_path(self._run_dir, rank) for rank in pids}
        for rank, pid in pids.items():
            # Before faulthandler is set up, the signal would end the process.
            if paths[rank].exists():
                send_to_main_thread(pid, signal.SIGUSR2)
                if read_state(pid) == psutil.STATUS_STOPPED:
                    send_signal(pid, signal.SIGCONT)
        deadline_s, stacks = time.monotonic() + _STACK_LIMIT_S, dict[int, str]()
        while time.monotonic() < deadline_s:
            # Short: a rank that was stopped runs on after it has written its stacks, until it is killed.
            time.sleep(_STACK_POLL_S)
            before, stacks = stacks, {rank: _text(path) for rank, path in paths.items()}
            if stacks == before and all(is_written(stacks[rank]) for rank, path in paths.items() if path.exists()):
                break
        for rank, path in paths.items():
            try:
                _write_private(self._log_dir / path.name, stacks[rank])
            except OSError as full:  # The ranks must be ended in any case.
                logger.warning("stacks of rank=%d are not kept: %s", rank, full)
        return stacks

    def _describe(self, hang: Hang, stacks: Mapping[int, str]) -> dict[str, str]:
        shown = [r for r in stacks if r == hang.rank] or sorted(stacks)
        text = ""
        for rank in shown:
            frames = main_frames(stacks[rank])[:_NUM_FRAMES]
            text += f"Stack of rank {rank} (most recent call first):\n" + "".join(f"{line}\n" for line in frames)
        text += f"Stacks of all threads: {self._log_dir}/stack_rank_N.txt\n"
        text += f"Hint: Raise hang_timeout_s={self._hang_timeout_s:g} where this only takes long.\n"
        place = "" if hang.rank is None else place_of(main_frames(stacks.get(hang.rank, "")))
        return {"message": hang.message + (place and f" ({place})"), "stacks": text}

    def _end_stuck_teardown(self, events: list[Event], pids: dict[int, int], alive: set[int]) -> None:
        for event in events:
            if (
                event.kind == "exception"
                and event.rank in alive
                and time.monotonic() - event.time_s > 2 * TEARDOWN_LIMIT_S
            ):
                kill_rank(pids[event.rank])

    def _end_waiting(self, events: list[Event], pids: dict[int, int], alive: Collection[int]) -> None:
        """Ends the survivors of a rank that failed or left, where the engine does not see it or they do not listen."""
        gone = set(pids) - set(alive)
        has_left = find_early_exit(events, gone) is not None
        failed = {e.rank for e in events if e.kind in ("exception", HANG)}
        has_failed = bool(failed & gone) or any(self._own_exit_codes().values()) or self._hang is not None
        # While a signal ends the run, the other ranks have until `grace_s` to save.
        is_stopping = any(e.kind in STOPS for e in events)
        if is_stopping or not (has_left or has_failed):
            self._ending_since_s = None
            return
        self._ending_since_s = self._ending_since_s or time.monotonic()
        waited_s = time.monotonic() - self._ending_since_s
        if has_left and waited_s > _EARLY_EXIT_GRACE_S and not self._is_told_to_end:
            self._is_told_to_end = True
            self._signal_all(pids, alive, signal.SIGTERM)
        elif waited_s > TEARDOWN_LIMIT_S:
            # A handler of the script never runs while the main thread waits in native code, so SIGKILL is needed.
            self._signal_all(pids, set(alive) - failed, signal.SIGKILL)

    def _signal_all(self, pids: dict[int, int], ranks: Collection[int], signal_number: signal.Signals) -> None:
        for rank in ranks:
            kill_rank(pids[rank]) if signal_number == signal.SIGKILL else send_signal(pids[rank], signal_number)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _write_private(path: Path, text: str) -> None:
    """Writes a file that this user alone can read; a link in its place is replaced and not followed."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
