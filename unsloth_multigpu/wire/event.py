"""Messages between a supervisor and its ranks, as files in the run's folder.

Ranks append events to a file of JSON lines. The supervisor, which may not reach the store of the ranks, asks them to
stop by a file.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.process import open_private

# The same signal twice within this time counts once: `timeout` and job managers signal a process and its group, srun
# the launcher and its ranks.
REPEAT_S = 0.2
# Rank 0 requests the generation server. Facts: its "port", and "arguments" of TRL's command, from the Trainer.
SERVER_WANTED = "server wanted"


@dataclass(frozen=True)
class Event:
    """An event of a rank.

    Args:
        kind: "started", "meeting" (to open a process group), "met", "training", "trained", "left_training" (by an
            error), "refused", "stopping", "stopped", "interrupted", "exception", "exiting" or SERVER_WANTED.
        time_s: Time of `time.monotonic`, which all processes of a machine share.
        step: Last finished optimizer step, -1 before the first training.
        facts: Further values of the kind, such as pid, exit_code, error, traceback, checkpoint.
    """

    kind: str
    rank: int
    attempt: int
    time_s: float
    step: int
    facts: dict[str, Any]


class EventWriter:
    """Appends one rank's events to its file in the run's private folder. `beat`, its heartbeat page, has the step."""

    def __init__(self, run_dir: str | os.PathLike[str], rank: int, attempt: int, beat: HeartbeatPage) -> None:
        self.run_dir = run_dir
        self.attempt = attempt
        self._path = Path(run_dir) / f"events_rank_{rank}.jsonl"
        self._rank = rank
        self.beat = beat

    def write(self, kind: str, **facts: Any) -> None:
        """Adds an event.

        Raises:
            OSError: The folder is gone or the disk is full. It has the file's name.
        """
        line = json.dumps([kind, self._rank, self.attempt, time.monotonic(), self.beat.step, facts])
        try:
            with open(self._path, "a", encoding="utf-8", opener=open_private) as file:
                # The first newline ends a line that a full disk has truncated.
                file.write(f"\n{line}\n")
        except OSError as error:
            error.filename = str(self._path)  # An error of `write` has no file name.
            raise


def read_events(run_dir: str | os.PathLike[str], attempt: int) -> list[Event]:
    """Returns all ranks' events of one attempt, oldest first. Incomplete lines are ignored."""
    events = []
    for path in Path(run_dir).glob("events_rank_*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            with suppress(ValueError, TypeError):
                event = Event(*json.loads(line if line.endswith("\n") else ""))
                events += [event] if event.attempt == attempt else []
    return sorted(events, key=lambda e: e.time_s)


@dataclass(frozen=True)
class StopRequest:
    """A request to the ranks of a machine to stop by `deadline_s`, on the clock of `time.monotonic`, after a signal."""

    signal_number: int
    deadline_s: float


def ask_to_stop(run_dir: str | os.PathLike[str], request: StopRequest) -> None:
    """Asks the ranks to stop. Only the first request counts, and no attempt follows."""
    # A symbolic link may hold any text. It is created atomically, only once, and also on a full disk.
    with suppress(FileExistsError):
        os.symlink(f"{request.signal_number} {request.deadline_s!r}", Path(run_dir, "stop"))


def read_request(run_dir: str | os.PathLike[str]) -> StopRequest | None:
    """Returns the request to the ranks, None as long as there is none. Takes microseconds."""
    try:
        signal_number, deadline_s = os.readlink(Path(run_dir, "stop")).split()
    except FileNotFoundError:
        return None
    return StopRequest(int(signal_number), float(deadline_s))


def stack_path(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """Returns the file for a rank's stacks, which it writes after SIGUSR2; see `stack.read_stacks`."""
    return Path(run_dir, f"stack_rank_{rank}.txt")
