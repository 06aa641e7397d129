"""What `unsloth-multigpu chaos` finds in the records of a run, and the table that it makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsloth_multigpu.cli.screen import Screen

# Largest difference of a weight, relative to the largest weight, that the rounding of fp32 explains.
ROUNDING = 1e-5
_TOLD_CHARACTERS = 240
_COLUMNS = (
    "fault",
    "what the user reads",
    "ended after s",
    "exit code",
    "orphans",
    "resumed from step",
    "new step after s",
    "samples lost / repeated",
    "weights",
)


@dataclass(frozen=True)
class RunTrace:
    """What all ranks of a row wrote down, over all starts.

    Args:
        records: Of all ranks, oldest first; each with its rank.
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
        """Records of one event."""
        return [record for record in self.records if record["event"] == event]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the first training."""
        return max((r["step"] for r in self.of("step") if r["training"] == 0), default=0)

    def first_step_s(self, since_s: float) -> float | None:
        """When the first step ended in a process that began to train after `since_s`; None if there is none."""
        before = {r["pid"] for r in self.records if r["time_s"] <= since_s}
        return next((float(r["time_s"]) for r in self.of("step") if r["pid"] not in before), None)

    def samples(self) -> dict[tuple[int, int], Counter[str]]:
        """Samples of each (training, step) over all ranks. A step that was made again counts as it was made last."""
        latest = {(r["training"], r["step"], r["rank"]): Counter(r["samples"]) for r in self.of("step")}
        steps: dict[tuple[int, int], Counter[str]] = {}
        for (training, step, _), samples in latest.items():
            steps.setdefault((training, step), Counter()).update(samples)
        return steps


def compare_samples(whole: RunTrace, other: RunTrace) -> tuple[int, int]:
    """Number of samples that are missing and of samples that are repeated, compared step by step with the whole run."""
    expected, found = whole.samples(), other.samples()
    keys = expected.keys() | found.keys()
    lost = sum((expected.get(k, Counter()) - found.get(k, Counter())).total() for k in keys)
    return lost, sum((found.get(k, Counter()) - expected.get(k, Counter())).total() for k in keys)


def compare_weights(whole: Path, other: Path) -> float | None:
    """Largest difference of a weight of any training, relative to the largest weight; None where weights are missing.

    Args:
        whole: Folder of the records of the run without faults.
        other: The same of another run.
    """
    import torch
    from safetensors import safe_open

    worst = 0.0
    for path in sorted(whole.glob("weights_*.safetensors")):
        if not (other / path.name).exists():
            return None
        with safe_open(path, "pt") as ours, safe_open(other / path.name, "pt") as theirs:
            if set(ours.keys()) != set(theirs.keys()):
                return None
            for name in ours.keys():  # noqa: SIM118 (no mapping)
                a, b = ours.get_tensor(name), theirs.get_tensor(name)
                if not torch.equal(a, b):
                    difference = (a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-30)
                    worst = max(worst, float(difference.nan_to_num(torch.inf)))
    return worst


@dataclass
class FaultRow:
    """One fault, and what came of it.

    Args:
        told: What the user reads.
        ended_s: Seconds from the fault until the last process was gone; None where the run was restarted or continued.
        code: Exit code of the run that met the fault.
        from_step: The finished step from which the training went on; None where it was not restarted.
        new_step_s: Seconds from the fault, or from the second start of the command, to the first new step.
        lost, repeated: Samples that did not count, and that counted once too often, against the run without faults.
        difference: See `compare_weights`.
        reasons: Why the row is not as it should be.
        note: Why the fault could not be planted.
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

    def cells(self) -> list[str]:
        """Texts of the table's columns."""
        if self.note:
            return [self.fault, self.note, *["-"] * (len(_COLUMNS) - 2)]
        samples = "-" if self.lost is None else f"{self.lost} / {self.repeated}"
        code = "none" if self.code is None else str(self.code)
        weights = {None: "-", 0.0: "equal"}.get(self.difference, f"off by {self.difference or 0:.1e}")
        times = ["-" if s is None else f"{s:.1f}" for s in (self.ended_s, self.new_step_s)]
        told = self.told.removesuffix(" The other ranks were stopped.")
        told = told if len(told) <= _TOLD_CHARACTERS else told[:_TOLD_CHARACTERS] + " ..."
        step = "-" if self.from_step is None else str(self.from_step)
        return [self.fault, told or "-", times[0], code, str(self.num_orphans), step, times[1], samples, weights]


def show(rows: Sequence[FaultRow], screen: Screen) -> None:
    """The table; what the user reads, which is too long for a column, is below it."""
    cells = [row.cells() for row in rows]
    columns, *short = ([fault, *rest] for fault, _told, *rest in [_COLUMNS, *cells])
    screen.table(columns, short, num_left=1)
    for fault, told, *_rest in cells:
        screen.line(f"{fault}: {told}")
    screen.line()
