"""Messages of a supervisor to its ranks, as files in the run's folder, since it may not reach the ranks' store.

One asks the ranks to stop. The other says that the generation server, which rank 0 has requested by an event, answers.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The same signal twice within this time counts once: `timeout` and job managers signal a process and its group, srun
# the launcher and its ranks.
REPEAT_S = 0.2
# Kind of the event. Its facts: "port" of the server, and "arguments" of TRL's command, from the Trainer.
SERVER_WANTED = "server wanted"


@dataclass(frozen=True)
class StopRequest:
    """A request to the ranks of a machine to stop by `deadline_s`, on the clock of `time.monotonic`, after a signal."""

    signal_number: int
    deadline_s: float


def ask_to_stop(run_dir: str | os.PathLike[str], attempt: int, request: StopRequest) -> None:
    """Asks the ranks of an attempt to stop. Only the first request counts."""
    # A symbolic link may hold any text. It is created atomically, only once, and also on a full disk.
    with suppress(FileExistsError):
        os.symlink(f"{request.signal_number} {request.deadline_s!r}", Path(run_dir, f"stop_{attempt}"))


def read_request(run_dir: str | os.PathLike[str], attempt: int) -> StopRequest | None:
    """Returns the request to the ranks of an attempt, None as long as there is none. Takes microseconds."""
    try:
        signal_number, deadline_s = os.readlink(Path(run_dir, f"stop_{attempt}")).split()
    except FileNotFoundError:
        return None
    return StopRequest(int(signal_number), float(deadline_s))


def say_ready(run_dir: str | os.PathLike[str], attempt: int) -> None:
    """Tells the ranks that the generation server of this attempt answers."""
    Path(run_dir, f"server_{attempt}").touch(mode=0o600)


def is_ready(run_dir: str | os.PathLike[str], attempt: int) -> bool:
    """True once the generation server of this attempt has answered. Takes microseconds."""
    return Path(run_dir, f"server_{attempt}").exists()
