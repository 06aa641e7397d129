"""Evaluates the records of a run for `unsloth-multigpu chaos`, and prints the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsloth_multigpu.cli.screen import Screen

# Largest difference of a weight, relative to the largest weight, that fp32 rounding explains.
ROUNDING = 1e-5


@dataclass(frozen=True)
class RunTrace:
    """Records of all ranks of a row, over all starts.

    Args:
        records: Records with their ranks, oldest first.
    """

    records: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RunTrace:
        """Reads the files of all ranks."""
        from unsloth_multigpu.tools.chaos.inject import read_records

        ranks = [int(path.stem.rpartition("_")[2]) for path in folder.glob("rank_*.jsonl")]
        found = [{**record, "rank": rank} for rank in ranks for record in read_records(folder, rank)]
        return cls(sorted(found, key=lambda r: float(r["time_s"])))

    def of(self, event: str) -> list[dict[str, Any]]:
        """Returns the records of one event."""
        return [record for record in self.records if record["event"] == event]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the first training."""
        return max((r["step"] for r in self.of("step") if r["training"] == 0), default=0)

    def first_step_s(self, since_s: float) -> float | None:
        """Returns the end of the first step of processes that began to train after `since_s`; None without one."""
        before = {r["pid"] for r in self.records if r["time_s"] <= since_s}
        return next((float(r["time_s"]) for r in self.of("step") if r["pid"] not in before), None)

    def samples(self) -> dict[tuple[int, int], Counter[str]]:
        """Returns the samples of each (training, step) over all ranks. Of a repeated step, the last time counts."""
        latest = {(r["training"], r["step"], r["rank"]): Counter(r["samples"]) for r in self.of("step")}
        steps: dict[tuple[int, int], Counter[str]] = {}
        for (training, step, _), samples in latest.items():
            steps.setdefault((training, step), Counter()).update(samples)
        return steps


def compare_samples(whole: RunTrace, other: RunTrace) -> tuple[int, int]:
    """Returns the numbers of missing and of repeated samples, compared step by step with the run without faults."""
    expected, found = whole.samples(), other.samples()
    keys = expected.keys() | found.keys()
    lost = sum((expected.get(k, Counter()) - found.get(k, Counter())).total() for k in keys)
    return lost, sum((found.get(k, Counter()) - expected.get(k, Counter())).total() for k in keys)


def compare_weights(whole: Path, other: Path) -> float | None:
    """Returns the largest difference of a weight, relative to the largest weight; None if weights are missing.

    Args:
        whole: Folder of the records of the run without faults.
        other: Folder of the records of another run.
    """
    import torch
    from safetensors.torch import load_file

    worst = 0.0
    for path in sorted(whole.glob("weights_*.safetensors")):
        ours, theirs = (load_file(f) if f.exists() else {} for f in (path, other / path.name))
        if ours.keys() != theirs.keys():
            return None
        for name, value in ours.items():
            difference = (value.double() - theirs[name].double()).abs().max()
            worst = max(worst, float((difference / value.double().abs().max().clamp(min=1e-30)).nan_to_num(torch.inf)))
    return worst


@dataclass
class FaultRow:
    """One fault and its result.

    Args:
        told: The launcher's message.
        ended_s: Seconds from the fault until the last process was gone; None if the run was restarted or continued.
        code: Exit code of the run with the fault.
        from_step: The finished step from which the training resumed; None if it was not restarted.
        new_step_s: Seconds from the fault, or from the second start of the command, to the first new step.
        lost, repeated: Samples that are missing or repeated, compared with the run without faults.
        difference: See `compare_weights`.
        reasons: Deviations from the expected result.
        note: Why the fault could not be injected.
    """

    fault: str
    told: str = ""
    ended_s: float | None = None
    code: int | None = None
    num_orphans: int = 0
    from_step: int | None = None
    new_step_s: float | None = None
    lost: int | None = None
    repeated: int | None = None
    difference: float | None = None
    reasons: list[str] = field(default_factory=list)
    note: str = ""

    def cells(self) -> dict[str, str]:
        """Returns the row of the table by column."""
        cells = {
            "fault": self.fault,
            "ended after s": "-" if self.ended_s is None else f"{self.ended_s:.1f}",
            "exit code": "none" if self.code is None else str(self.code),
            "orphans": str(self.num_orphans),
            "resumed from step": "-" if self.from_step is None else str(self.from_step),
            "new step after s": "-" if self.new_step_s is None else f"{self.new_step_s:.1f}",
            "samples lost / repeated": "-" if self.lost is None else f"{self.lost} / {self.repeated}",
            "weights": {None: "-", 0.0: "equal"}.get(self.difference, f"off by {self.difference or 0:.1e}"),
        }
        return {**dict.fromkeys(cells, "-"), "fault": self.fault} if self.note else cells


def show(rows: Sequence[FaultRow], screen: Screen) -> None:
    """Prints the table, and below it the messages, which are too long for a column."""
    cells = [row.cells() for row in rows]
    screen.table(list(cells[0]), [list(row.values()) for row in cells], num_left=1)
    for row in rows:
        screen.line(f"{row.fault}: {row.note or row.told.removesuffix(' The other ranks were stopped.') or '-'}")
    screen.line()
