"""What a run did, as plain data: events that ranks leave as JSON lines, and the figures of a training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsloth_multigpu.wire.beat import BeatPage


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
    """All ranks' shares of a training, in the order of ranks.

    Args:
        planner: What the planner had measured at the end, as JSON values; empty where samples were dealt in order.
    """

    ranks: tuple[RankReport, ...]
    planner: Mapping[str, Any] = field(default_factory=dict)

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
    """Something that a rank says of itself: started, training, trained, stopping, stopped, interrupted, exception or
    exiting.

    Args:
        time_s: When, on the clock of `time.monotonic`, which all processes of a machine share and nobody sets.
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
    """Appends one rank's events to its file in the run's private folder.

    Args:
        run_dir: The run's private folder.
        attempt: How often the ranks were started before.
        beat: This rank's page, which knows the step.
    """

    def __init__(self, run_dir: str | os.PathLike[str], rank: int, attempt: int, beat: BeatPage) -> None:
        self._path = Path(run_dir) / f"events_rank_{rank}.jsonl"
        self._rank = rank
        self._attempt = attempt
        self._beat = beat

    def write(self, kind: str, **facts: Any) -> None:
        """Adds an event; raises OSError, with the file's name, where the folder is gone or the disk is full."""
        line = json.dumps([kind, self._rank, self._attempt, time.monotonic(), self._beat.step, facts])
        try:
            with open(self._path, "a", encoding="utf-8", opener=_open_private) as file:
                file.write(line + "\n")
        except OSError as error:
            error.filename = str(self._path)  # A write that fails does not say where.
            raise


def read_events(run_dir: str | os.PathLike[str], attempt: int) -> list[Event]:
    """All ranks' events of one attempt, oldest first. A line that is still being written is left for the next look."""
    events = []
    for path in Path(run_dir).glob("events_rank_*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            event = _parse_event(line)
            if event is not None and event.attempt == attempt:
                events.append(event)
    return sorted(events, key=lambda e: e.time_s)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _parse_event(line: str) -> Event | None:
    """None for a line that is not whole: still being written, or cut by a full disk."""
    try:
        return Event(*json.loads(line)) if line.endswith("\n") else None
    except (ValueError, TypeError):
        return None
