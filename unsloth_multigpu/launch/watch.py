"""Sees what torch elastic cannot: a rank that left with exit code 0, or whose teardown hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from unsloth_multigpu.fault.beat import Beat, read_beats
from unsloth_multigpu.launch.cause import Cause, find_cause, find_early_exit
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.report import Event, read_events

logger = get_logger(__name__)

POLL_S = 0.1
# Ranks leave a training together, but never in the same instant.
EARLY_EXIT_GRACE_S = 2.0
# After an error Python still joins threads and runs exit handlers; a process group may block that for ever.
TEARDOWN_LIMIT_S = 3.0


class Watch:
    """Follows the ranks' events in a thread, and ends ranks that would wait for ever.

    Args:
        run_dir: The run's private folder.
        on_restart: Told why the ranks are started again, and for which time.
    """

    def __init__(self, run_dir: Path, on_restart: Callable[[Cause, int], None]) -> None:
        self._run_dir = run_dir
        self._on_restart = on_restart
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unsloth_multigpu-watch", daemon=True)
        self._attempt = 0
        self._left_since: float | None = None
        self._beats: dict[int, Beat] = {}
        self.gone: set[int] = set()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread; `gone` and `events` stay readable."""
        self._stop.set()
        self._thread.join()

    def events(self) -> list[Event]:
        """Events of the latest attempt."""
        while read_events(self._run_dir, self._attempt + 1):
            cause = find_cause(read_events(self._run_dir, self._attempt), {}, self.gone, self._beats)
            self._on_restart(cause, self._attempt + 1)
            self._attempt, self._left_since, self.gone = self._attempt + 1, None, set()
        return read_events(self._run_dir, self._attempt)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            events = self.events()
            if not self.gone:
                self._beats = read_beats(self._run_dir)
            pids = {e.rank: int(e.facts["pid"]) for e in events if e.kind == "started"}
            alive = {r for r, pid in pids.items() if is_alive(pid)}
            if len(alive) == len(pids):
                self.gone = set()
            elif not self.gone:
                self.gone = set(pids) - alive
            self._end_stuck_teardown(events, pids, alive)
            self._end_waiting(events, pids, alive)

    def _end_stuck_teardown(self, events: list[Event], pids: dict[int, int], alive: set[int]) -> None:
        for event in events:
            if (
                event.kind == "exception"
                and event.rank in alive
                and time.monotonic() - event.time_s > 2 * TEARDOWN_LIMIT_S
            ):
                _signal(pids[event.rank], signal.SIGKILL)

    def _end_waiting(self, events: list[Event], pids: dict[int, int], alive: set[int]) -> None:
        if find_early_exit(events, set(pids) - alive) is None:
            self._left_since = None
        elif self._left_since is None:
            self._left_since = time.monotonic()
        elif time.monotonic() - self._left_since > EARLY_EXIT_GRACE_S:
            for rank in alive:
                _signal(pids[rank], signal.SIGTERM)


def is_alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.debug("pid=%d had already ended", pid)
