"""The ranks of one attempt: starts, signals and collects their processes, and watches them, all in one thread.

Ends ranks that hang, and the survivors of a rank that failed or left too early.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.launch.cause import HANG, STOPS, Cause, find_cause, find_early_exit
from unsloth_multigpu.launch.rank import TEARDOWN_LIMIT_S
from unsloth_multigpu.launch.watchdog import Hang, find_hang
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.child import kill_rank, start_process, wait_after_kill
from unsloth_multigpu.wire.event import Event, read_events
from unsloth_multigpu.wire.heartbeat import Heartbeat, read_beats
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import read_state, send_signal, write_private
from unsloth_multigpu.wire.stack import main_frames, place_of, read_stacks

logger = get_logger(__name__)

POLL_S = 0.1
# How long the other ranks may take to leave a training that one has left.
_EARLY_EXIT_GRACE_S = 2.0
# A longer time between two calls means that this process or its machine was suspended, perhaps with the ranks.
_PAUSE_S = 5.0
_STACK_LIMIT_S = 5.0
_NUM_FRAMES = 8


@dataclass(eq=False, repr=False)
class Ranks(AbstractContextManager["Ranks"]):
    """The processes of this node's ranks, each the leader of its own session. Used by one thread.

    Attributes:
        exit_codes: Exit code of each rank that has ended; -N = ended by signal N.
    """

    processes: Mapping[int, subprocess.Popen[bytes]]
    exit_codes: dict[int, int] = field(default_factory=dict)

    def __exit__(self, *exc_info: object) -> None:
        self.send(signal.SIGKILL)
        for rank in self.living():
            wait_after_kill(self.processes[rank])

    def living(self) -> dict[int, int]:
        """Returns the process ids of the ranks that run, and collects the exit codes of the others."""
        for rank, process in self.processes.items():
            if rank not in self.exit_codes and (code := process.poll()) is not None:
                self.exit_codes[rank] = code
        return {rank: process.pid for rank, process in self.processes.items() if rank not in self.exit_codes}

    def send(self, signal_number: signal.Signals, ranks: Collection[int] | None = None) -> None:
        """Sends a signal to the process groups of living ranks. None = to all of them."""
        for rank, pid in self.living().items():
            if ranks is None or rank in ranks:
                if signal_number == signal.SIGKILL:
                    kill_rank(pid)
                else:
                    # The rank has ended meanwhile, or another user's program leads its group.
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal_number)


def start_ranks(command: Sequence[str], first: RankIdentity, environment: Mapping[str, str], log_dir: Path) -> Ranks:
    """Starts the ranks of this node. `first` keeps the terminal; the others write to a log and have no stdin.

    Raises:
        LaunchError: The system cannot start another process.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        ranks = stack.enter_context(Ranks(processes))
        for local_rank in range(first.local_world_size):
            rank = first.rank + local_rank
            variables = {**environment, **replace(first, rank=rank, local_rank=local_rank).variables()}
            log = None if local_rank == 0 else log_dir / f"rank_{rank}.log"
            try:
                processes[rank] = start_process(command, variables, log)
            except OSError as error:
                raise LaunchError(
                    f"rank {rank} could not be started: {error}.",
                    hint="Free memory or end processes on this machine, or start fewer ranks.",
                ) from error
        stack.pop_all()
    return ranks


def count_memory_kills() -> int:
    """Returns the number of processes that the kernel has killed for lack of memory since boot."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@dataclass(eq=False, repr=False)
class Watch:
    """Reads the ranks' events and heartbeats, and ends ranks that would wait forever.

    Args:
        log_dir: Folder for the stacks of a hang.
        unheard_s: Returns the seconds since the last record of each other node, by the node's name.

    Attributes:
        must_end: Another node or the server has failed, so all ranks must end.
    """

    ranks: Ranks
    run_dir: Path
    log_dir: Path
    config: MultiGPUConfig
    attempt: int
    unheard_s: Callable[[], Mapping[str, float]] = dict
    must_end: bool = field(init=False, default=False)
    _num_kills_before: int = field(init=False, default_factory=count_memory_kills)
    _beats: dict[int, Heartbeat] = field(init=False, default_factory=dict)
    _last_look_s: float = field(init=False, default_factory=time.monotonic)
    _since_s: float = field(init=False, default_factory=time.monotonic)
    _ending_since_s: float | None = field(init=False, default=None)
    _is_told_to_end: bool = field(init=False, default=False)
    _hang: Event | None = field(init=False, default=None)
    # Ranks that had ended before the supervisor stopped any.
    _gone: set[int] = field(init=False, default_factory=set)

    def events(self) -> list[Event]:
        """Returns all ranks' events of this attempt, oldest first, including a hang that was found."""
        events = read_events(self.run_dir, self.attempt)
        return events if self._hang is None else [*events, self._hang]

    @property
    def has_failed(self) -> bool:
        """True once a rank has failed or hangs."""
        return self._hang is not None or any(self.ranks.exit_codes.values())

    def look(self) -> list[Event]:
        """Called about ten times a second, and once after all ranks have ended. Returns `events()`."""
        events, living = self.events(), self.ranks.living()
        if not self._gone:
            self._beats = read_beats(self.run_dir)
            self._gone = set() if self._is_told_to_end else set(self.ranks.exit_codes)
        self._end_hang(events, living)
        # Kill ranks whose teardown hangs.
        late_s = time.monotonic() - 2 * TEARDOWN_LIMIT_S
        self.ranks.send(signal.SIGKILL, {e.rank for e in events if e.kind == "exception" and e.time_s < late_s})
        self._end_waiting(events)
        return events

    def cause(self) -> Cause:
        """Returns why this attempt has failed; see `find_cause`."""
        events = self.events()
        return find_cause(
            events,
            {rank: code for rank, code in self.ranks.exit_codes.items() if code or rank in self._gone},
            self._gone,
            self._beats if events else {},  # Without events the pages are from an earlier attempt.
            num_memory_kills=count_memory_kills() - self._num_kills_before,
            is_one_node=self.config.nnodes == 1,
        )

    def _end_hang(self, events: list[Event], living: Mapping[int, int]) -> None:
        now_s = time.monotonic()
        if now_s - self._last_look_s > _PAUSE_S:
            self._since_s = now_s
        self._last_look_s = now_s
        started = {event.rank for event in events if event.kind == "started"}
        is_ending = {event.kind for event in events} & {HANG, "exception", *STOPS}
        if is_ending or min(len(living), len(started)) < len(self.ranks.processes) or not self._find_hang():
            return
        # A page that is read while it is written may mix two states. A real hang is found again.
        time.sleep(POLL_S)
        self._beats = read_beats(self.run_dir)
        if hang := self._find_hang():
            facts = self._describe(hang, self._collect_stacks(living))
            rank = -1 if hang.rank is None else hang.rank
            self._hang = Event(HANG, rank, self.attempt, now_s, hang.step, facts)
            self.ranks.send(signal.SIGKILL, None if hang.rank is None else {rank})

    def _find_hang(self) -> Hang | None:
        limit_s, unheard_s = self.config.hang_timeout_s, self.unheard_s()
        return find_hang(self._beats, time.monotonic(), limit_s, since_s=self._since_s, unheard_s=unheard_s)

    def _collect_stacks(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Returns every rank's stacks, "" if it writes none, and saves them in the log folder."""
        for pid in pids.values():
            if read_state(pid) == "stopped":
                send_signal(pid, signal.SIGCONT)
        stacks = read_stacks(self.run_dir, pids, _STACK_LIMIT_S)
        for rank, stack in stacks.items():
            try:
                write_private(self.log_dir / f"stack_rank_{rank}.txt", stack)
            except OSError as full:  # Go on: the ranks must be ended.
                logger.warning("stacks of rank=%d were not saved: %s", rank, full)
        return stacks

    def _describe(self, hang: Hang, stacks: Mapping[int, str]) -> dict[str, str]:
        text = ""
        for rank in [r for r in stacks if r == hang.rank] or sorted(stacks):
            frames = main_frames(stacks[rank])[:_NUM_FRAMES]
            text += f"Stack of rank {rank} (most recent call first):\n" + "".join(f"{line}\n" for line in frames)
        text += f"Stacks of all threads: {self.log_dir}/stack_rank_N.txt\n"
        text += f"Hint: If the rank was only slow, raise hang_timeout_s={self.config.hang_timeout_s:g}.\n"
        place = "" if hang.rank is None else place_of(main_frames(stacks.get(hang.rank, "")))
        return {"message": hang.message + (place and f" ({place})"), "stacks": text}

    def _end_waiting(self, events: list[Event]) -> None:
        """Ends the survivors of a rank that failed or left."""
        # After a signal the ranks have `grace_s` to save.
        is_stopping = any(event.kind in STOPS for event in events)
        must_end = self.must_end or self.has_failed
        if is_stopping or not (must_end or find_early_exit(events, self.ranks.exit_codes)):
            self._ending_since_s = None
            return
        self._ending_since_s = self._ending_since_s or time.monotonic()
        waited_s = time.monotonic() - self._ending_since_s
        if not self._is_told_to_end and (must_end or waited_s > _EARLY_EXIT_GRACE_S):
            self._is_told_to_end = True
            self.ranks.send(signal.SIGTERM)
        elif waited_s > TEARDOWN_LIMIT_S:
            # SIGKILL, because Python handlers do not run while the main thread waits in native code.
            in_teardown = {event.rank for event in events if event.kind in ("exception", HANG)}
            self.ranks.send(signal.SIGKILL, self.ranks.living().keys() - in_teardown)
