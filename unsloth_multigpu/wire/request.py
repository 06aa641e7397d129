"""Requests of a supervisor to stop the ranks. They are in the run's folder: it may not reach the ranks' store."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The same signal twice within this time counts once: `timeout` and job managers signal a process and its group, srun
# the launcher and its ranks.
REPEAT_S = 0.2


@dataclass(frozen=True)
class StopRequest:
    """A request to the ranks of a machine to stop.

    Args:
        signal_number: The signal that caused it.
        deadline_s: When the ranks must have stopped, on the clock of `time.monotonic`.
    """

    signal_number: int
    deadline_s: float


def ask_to_stop(run_dir: str | os.PathLike[str], attempt: int, request: StopRequest) -> None:
    """Asks the ranks of an attempt to stop. Only the first request counts."""
    # A symbolic link may hold any text. It is created atomically, only once, and also on a full disk.
    with suppress(FileExistsError):
        os.symlink(f"{request.signal_number} {request.deadline_s!r}", _path(run_dir, attempt))


def read_request(run_dir: str | os.PathLike[str], attempt: int) -> StopRequest | None:
    """Returns the request to the ranks of an attempt, None as long as there is none. Takes microseconds."""
    try:
        signal_number, deadline_s = os.readlink(_path(run_dir, attempt)).split()
    except FileNotFoundError:
        return None
    return StopRequest(int(signal_number), float(deadline_s))


def _path(run_dir: str | os.PathLike[str], attempt: int) -> Path:
    return Path(run_dir, f"stop_{attempt}")
