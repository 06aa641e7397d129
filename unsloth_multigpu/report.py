"""What a run did, as plain data: events that ranks leave as JSON lines, and the figures of a training."""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankReport:
    """One rank's share of a training.

    Args:
        rank: Which rank.
        num_steps: Optimizer steps.
        num_samples: Samples whose gradient counted, over all steps.
        num_micro_batches: Forward-backward passes.
        train_s: Seconds inside `Trainer.train`.
        sent_bytes: What gradients or weights were sent, without headers, in the algorithms that are usual; None where
            it is not known.
    """

    rank: int
    num_steps: int
    num_samples: int
    num_micro_batches: int
    train_s: float
    sent_bytes: int | None = None


@dataclass(frozen=True)
class RunReport:
    """All ranks' shares of a training, in the order of ranks."""

    ranks: tuple[RankReport, ...]

    @property
    def num_samples(self) -> int:
        """Samples of all ranks together."""
        return sum(r.num_samples for r in self.ranks)

    def summary(self, traffic: str = "sent={:.1f} MB per rank") -> str:
        """One line of facts.

        Args:
            traffic: What it says of the `sent_bytes` of the rank that sent most, in MB.
        """
        slowest_s = max(r.train_s for r in self.ranks)
        shares = "+".join(str(r.num_samples) for r in self.ranks)
        line = f"trained steps={self.ranks[0].num_steps} samples={self.num_samples} ({shares}) seconds={slowest_s:.1f}"
        sent = [r.sent_bytes for r in self.ranks if r.sent_bytes is not None]
        return f"{line} {traffic.format(max(sent) / 1e6)}" if sent else line


@dataclass(frozen=True)
class Event:
    """Something that a rank says of itself: started, training, trained, exception or exiting.

    Args:
        time_s: Seconds since the epoch.
        step: Last finished optimizer step, -1 before the first training.
        facts: What else belongs to the kind: pid, exit_code, error, traceback.
    """

    kind: str
    rank: int
    attempt: int
    time_s: float
    step: int
    facts: dict[str, Any]


class EventWriter:
    """Appends one rank's events to its file in the run's private folder, and keeps its last step beside them."""

    def __init__(self, run_dir: str | os.PathLike[str], rank: int, attempt: int) -> None:
        self._path = Path(run_dir) / f"events_rank_{rank}.jsonl"
        self._step_file = os.open(Path(run_dir) / f"step_rank_{rank}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._rank = rank
        self._attempt = attempt
        self.step = -1
        self.mark_step(-1)

    def write(self, kind: str, **facts: Any) -> None:
        """Adds an event; raises OSError where the folder is gone or the disk is full."""
        line = json.dumps([kind, self._rank, self._attempt, time.time(), self.step, facts])
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def mark_step(self, step: int) -> None:
        """Notes the last finished optimizer step: one system call, so that it survives the death of the rank."""
        self.step = step
        os.pwrite(self._step_file, struct.pack("<q", step), 0)


def read_steps(run_dir: str | os.PathLike[str]) -> dict[int, int]:
    """Last finished optimizer step of each rank, -1 before the first."""
    contents = {f.name: f.read_bytes() for f in Path(run_dir).glob("step_rank_*")}
    # Other lengths: the rank has just made the file, or the disk was full.
    written = {name: data for name, data in contents.items() if len(data) == 8}
    return {int(name.rpartition("_")[2]): struct.unpack("<q", data)[0] for name, data in written.items()}


def read_events(run_dir: str | os.PathLike[str], attempt: int) -> list[Event]:
    """All ranks' events of one attempt, oldest first. A line that is still being written is left for the next look."""
    events = []
    for path in Path(run_dir).glob("events_rank_*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            event = _parse_event(line)
            if event is not None and event.attempt == attempt:
                events.append(event)
    return sorted(events, key=lambda e: e.time_s)


def _parse_event(line: str) -> Event | None:
    """None for a line that is not whole: still being written, or cut by a full disk."""
    try:
        return Event(*json.loads(line)) if line.endswith("\n") else None
    except (ValueError, TypeError):
        return None
