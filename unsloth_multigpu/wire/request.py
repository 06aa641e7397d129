"""A supervisor asks its ranks to stop: in the run's folder, because it need not reach the ranks' store."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# `timeout` and job managers signal a process and its group, srun the ranks and so does their launcher: the same signal
# twice within this time is one.
REPEAT_S = 0.2


@dataclass(frozen=True)
class StopRequest:
    """What the ranks of a machine are asked.

    Args:
        signal_number: The signal for which they stop.
        deadline_s: When they must have stopped, on the clock of `time.monotonic`.
    """

    signal_number: int
    deadline_s: float


def ask_to_stop(run_dir: str | os.PathLike[str], attempt: int, request: StopRequest) -> None:
    """Asks the ranks of an attempt to stop. The first to ask is heard."""
    # What a symbolic link points to may be any text. It comes there complete, only once, and also on a full disk.
    with suppress(FileExistsError):
        os.symlink(f"{request.signal_number} {request.deadline_s!r}", _path(run_dir, attempt))


def read_request(run_dir: str | os.PathLike[str], attempt: int) -> StopRequest | None:
    """What the ranks of an attempt are asked, None as long as nobody has. Takes microseconds."""
    try:
        signal_number, deadline_s = os.readlink(_path(run_dir, attempt)).split()
    except FileNotFoundError:
        return None
    return StopRequest(int(signal_number), float(deadline_s))


def _path(run_dir: str | os.PathLike[str], attempt: int) -> Path:
    return Path(run_dir, f"stop_{attempt}")
