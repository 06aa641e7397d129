"""What gradient_sync.py measured, variant by variant, compared with DDP."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

# Relative distance of the final weights, or of a loss, that the order of additions explains; mistakes make 1e-2 and up.
SAME = 1e-3
# A loss so near to DDP's, relative, nobody would tell from it in a plot.
NEAR = 0.02
# `unsloth-multigpu verify` allows this for the gradient norm in fp32.
VERIFY_BOUND = 1e-4
MORE = 1.01
DDP = "ddp"


@dataclass(frozen=True)
class Figures:
    """One variant of one task, over all seeds.

    Args:
        losses: `losses[seed][epoch]`, nats.
        pace: Loss of the epoch in the middle against DDP's with the same seed: "slower" or "faster" in every seed,
            "unclear", "near DDP", or "as DDP" in all epochs; "fails" where the last epoch is no better than the first.
        norm_ratio: Gradient norm of the first update, in parts of DDP's.
        update_ratio: Number of updates of rank 0, in parts of DDP's.
        rank_0_accuracy: At the end; `best_accuracy` is that of the rank with the best.
        divergence: Largest |w_rank - w_0| / |w_0| at the end.
    """

    name: str
    label: str
    kind: str
    is_bug: bool
    what: str
    losses: list[list[float]]
    accuracies: list[list[float]]
    rank_0_accuracy: float
    best_accuracy: float
    pace: str
    num_updates: list[int]
    update_ratio: float
    norm_ratio: float
    cosine: float | None
    divergence: float
    distance_from_ddp: float
    proofs: list[str]

    @property
    def is_caught(self) -> bool:
        return all(proof.startswith("caught") for proof in self.proofs)

    @property
    def is_equal(self) -> bool:
        return all(proof == "equal" for proof in self.proofs)

    @property
    def proof(self) -> str:
        """Short enough for a table."""
        return ", ".join(sorted({proof.partition(":")[0] for proof in self.proofs}))

    @property
    def trains_more(self) -> bool:
        return max(self.update_ratio, self.norm_ratio) > MORE


def figures_of(task: dict[str, Any]) -> dict[str, Figures]:
    """Variant -> its figures."""
    return {name: _figures(name, variant, task) for name, variant in task["variants"].items()}


def _figures(name: str, variant: dict[str, Any], task: dict[str, Any]) -> Figures:
    runs, of_ddp = variant["runs"], task["variants"][DDP]["runs"]
    last = [run["epochs"][-1] for run in runs]
    cosines = [run["gradient_cosine"] for run in runs if run["gradient_cosine"] is not None]
    losses = [[epoch["loss"] for epoch in run["epochs"]] for run in runs]
    ddp_losses = [[epoch["loss"] for epoch in run["epochs"]] for run in of_ddp]
    pairs = list(zip(runs, of_ddp, strict=True))
    return Figures(
        name=name,
        **{key: variant[key] for key in ("label", "kind", "is_bug", "what")},
        losses=losses,
        accuracies=[[epoch["accuracy"] for epoch in run["epochs"]] for run in runs],
        rank_0_accuracy=statistics.mean(epoch["accuracy"] for epoch in last),
        best_accuracy=statistics.mean(max(epoch["accuracy_of_ranks"]) for epoch in last),
        pace=_pace(losses, ddp_losses, half_epoch(task)),
        num_updates=runs[0]["num_updates"],
        update_ratio=runs[0]["num_updates"][0] / of_ddp[0]["num_updates"][0],
        norm_ratio=statistics.mean(run["gradient_norm"] / ddp["gradient_norm"] for run, ddp in pairs),
        cosine=statistics.mean(cosines) if cosines else None,
        divergence=statistics.mean(epoch["divergence"] for epoch in last),
        distance_from_ddp=max(run["distance_from_ddp"] for run in runs),
        proofs=[run["proof"] for run in runs],
    )


def half_epoch(task: dict[str, Any]) -> int:
    """The epoch in the middle, counted from 1: late enough to tell variants apart, and none of them is done."""
    return (task["num_epochs"] + 1) // 2


def _pace(losses: list[list[float]], ddp_losses: list[list[float]], epoch: int) -> str:
    pairs = list(zip(losses, ddp_losses, strict=True))
    if all(abs(a - b) <= SAME * abs(b) for run, ddp in pairs for a, b in zip(run, ddp, strict=True)):
        return "as DDP"
    if len(losses[0]) > 1 and not all(run[-1] < run[0] for run in losses):
        return "fails"
    changes = [run[epoch - 1] / ddp[epoch - 1] - 1 for run, ddp in pairs]
    if abs(statistics.mean(changes)) < NEAR:
        return "near DDP"
    ahead = [change < 0 for change in changes]
    return "faster" if all(ahead) else "unclear" if any(ahead) else "slower"


def mean_at(curves: list[list[float]], epoch: int) -> float:
    """Over the seeds; epochs count from 1."""
    return statistics.mean(curve[epoch - 1] for curve in curves)


def broken_promises(results: dict[str, Any]) -> list[str]:
    """Where a strategy is not DDP, or the replica proof misses a bug or sees one where there is none."""
    broken = []
    for name, task in results["tasks"].items():
        for f in figures_of(task).values():
            if f.kind == "strategy" and f.distance_from_ddp > SAME:
                broken.append(f"{name}: {f.label} ends {f.distance_from_ddp:.1e} away from DDP, allowed {SAME:.0e}.")
            if f.is_bug and not f.is_caught:
                broken.append(f"{name}: the replica proof did not catch: {f.label} ({f.proof}).")
            if not f.is_bug and any(proof.startswith("caught") for proof in f.proofs):
                broken.append(f"{name}: the replica proof found a difference that must not be: {f.label} ({f.proof}).")
    return broken
