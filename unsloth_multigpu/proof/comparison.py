"""Do one process and several ranks train the same? A decision over what both runs have left."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of a run.

    Args:
        step: Counted from 1.
        loss: As the Trainer logs it; None where it was not logged.
        grad_norm: L2 norm of the gradient of all weights, before clipping.
        samples: How often each sample was seen, over all ranks, by its fingerprint.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    samples: Counter[str]


@dataclass(frozen=True)
class RunRecord:
    """What a run has left.

    Args:
        steps: In their order.
        gradient_shares: For each trained tensor, its largest share of a step's gradient norm.
        facts: Device, precision, versions and the like, see `proof.receipt`.
    """

    steps: tuple[StepRecord, ...]
    gradient_shares: dict[str, float]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Bounds:
    """Largest differences that rounding explains.

    Args:
        loss: Relative to the loss or to 1, whichever is larger: some losses are zero on average.
        grad_norm: Relative.
        weights: L2 norm of the difference of a tensor relative to the tensor's.
        noise: A tensor with a smaller share of the gradient is left out: what it has may be rounding, of which Adam
            makes whole steps all the same.
    """

    loss: float
    grad_norm: float
    weights: float
    noise: float


@dataclass(frozen=True)
class StepDifference:
    """Both runs' figures of one step. Differences are 0 where both runs have no figure, infinite where one has none."""

    step: int
    num_samples: tuple[int, int]
    has_same_samples: bool
    loss: tuple[float | None, float | None]
    loss_difference: float
    grad_norm: tuple[float | None, float | None]
    grad_norm_difference: float


@dataclass(frozen=True)
class WeightDifference:
    """Relative L2 difference of one trained tensor after the last step; `counts` is False where it is noise."""

    name: str
    relative: float
    counts: bool


@dataclass(frozen=True)
class Comparison:
    """The verdict: `reasons` tells what disagrees, the first step and quantity first; empty = the runs agree."""

    steps: tuple[StepDifference, ...]
    weights: tuple[WeightDifference, ...]
    bounds: Bounds
    reasons: tuple[str, ...]

    @property
    def agree(self) -> bool:
        """True where every figure is within its bound."""
        return not self.reasons


def bounds_for(precision: str, optimizer: str) -> Bounds:
    """The bounds of a training.

    Args:
        precision: "fp32", "tf32", "fp16" or "bf16".
        optimizer: `TrainingArguments.optim`.
    """
    # Measured without a fault, tiny models on 2 and 3 ranks: in fp32 gradient norms differ by 7e-7, weights by 2e-6 and
    # LoRA weights that began at zero by 1.3e-4: there the first steps of Adam are signs of gradients. Real models
    # add up more numbers.
    bounds = Bounds(loss=1e-4, grad_norm=1e-4, weights=1e-3, noise=1e-6)
    if precision != "fp32":
        # Measured in bf16: gradient norm 2.5e-3, LoRA weights 5.6e-2.
        bounds = Bounds(loss=1e-2, grad_norm=2e-2, weights=2e-1, noise=1e-3)
    return replace(bounds, weights=2e-1) if "8bit" in optimizer else bounds


def read_run(folder: Path) -> RunRecord | None:
    """Puts together what the ranks of a run have left in `folder`; None if there is nothing."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank_*.json"))]
    if not records:
        return None
    first = next(record for record in records if record["rank"] == 0)
    steps = []
    for figures in first["steps"]:
        same_step = [s for record in records for s in record["steps"] if s["step"] == figures["step"]]
        samples = sum((Counter(s["samples"]) for s in same_step), Counter[str]())
        steps.append(StepRecord(figures["step"], figures["loss"], figures["grad_norm"], samples))
    return RunRecord(tuple(steps), first["gradient_shares"], first["facts"])


def compare_weights(one: Path, many: Path, shares: dict[str, float], noise: float) -> list[WeightDifference]:
    """Compares the tensors of two safetensors files, largest difference first.

    Args:
        one: File of the one-process run.
        many: File of rank 0 of the other.
        shares: `RunRecord.gradient_shares`.
        noise: `Bounds.noise`.
    """
    from safetensors import safe_open

    differences = []
    with safe_open(one, "pt") as first, safe_open(many, "pt") as second:
        names = set(second.keys())
        for name in first.keys():  # noqa: SIM118  (it is no dictionary)
            relative = (
                _relative_distance(first.get_tensor(name), second.get_tensor(name)) if name in names else math.inf
            )
            differences.append(WeightDifference(name, relative, shares.get(name, 1.0) >= noise))
        missing = names - set(first.keys())
    differences += [WeightDifference(name, math.inf, True) for name in sorted(missing)]
    return sorted(differences, key=lambda d: (not d.counts, -d.relative))


def compare(one: RunRecord, many: RunRecord, weights: Sequence[WeightDifference], bounds: Bounds) -> Comparison:
    """Judges both runs' steps and final weights.

    Args:
        one: The one-process run.
        many: The run of several ranks.
        weights: Largest difference that counts first, see `compare_weights`.
        bounds: What is allowed.
    """
    steps = tuple(_compare_step(a, b, bounds) for a, b in zip(one.steps, many.steps, strict=False))
    reasons = [reason for step in steps for reason in _reasons_of_step(step, bounds)]
    if len(one.steps) != len(many.steps):
        reasons.append(f"one process took {len(one.steps)} steps, the ranks {len(many.steps)}")
    wrong = [w for w in weights if w.counts and not w.relative <= bounds.weights]
    if wrong:
        reasons.append(
            f"final weights: {len(wrong)} of {len(weights)} tensors differ, {wrong[0].name} by {wrong[0].relative:.1e} "
            f"(bound {bounds.weights:.0e})"
        )
    return Comparison(steps, tuple(weights), bounds, tuple(reasons))


def _compare_step(one: StepRecord, many: StepRecord, bounds: Bounds) -> StepDifference:
    return StepDifference(
        step=one.step,
        num_samples=(one.samples.total(), many.samples.total()),
        has_same_samples=one.samples == many.samples,
        loss=(one.loss, many.loss),
        loss_difference=_relative(one.loss, many.loss, at_least=1.0),
        grad_norm=(one.grad_norm, many.grad_norm),
        grad_norm_difference=_relative(one.grad_norm, many.grad_norm),
    )


def _reasons_of_step(step: StepDifference, bounds: Bounds) -> list[str]:
    reasons = []
    if not step.has_same_samples:
        counts = f"{step.num_samples[0]} and {step.num_samples[1]}"
        reasons.append(f"step {step.step}: other samples ({counts} on one process and on the ranks)")
    for name, (one, many), difference, bound in (
        ("loss", step.loss, step.loss_difference, bounds.loss),
        ("gradient norm", step.grad_norm, step.grad_norm_difference, bounds.grad_norm),
    ):
        if not difference <= bound:
            shown = " and ".join("none" if value is None else f"{value:.6g}" for value in (one, many))
            reasons.append(
                f"step {step.step}: {name} {shown} on one process and on the ranks, "
                f"difference {difference:.1e} (bound {bound:.0e})"
            )
    return reasons


def _relative(one: float | None, many: float | None, at_least: float = 0.0) -> float:
    if one is None or many is None:
        return 0.0 if one is many else math.inf
    if not (math.isfinite(one) and math.isfinite(many)):
        # fp16 begins with steps that overflow, and skips them; which of the two it is does not matter.
        return math.inf if math.isfinite(one) or math.isfinite(many) else 0.0
    scale = max(abs(one), abs(many), at_least)
    return abs(one - many) / scale if scale else 0.0


def _relative_distance(one: torch.Tensor, many: torch.Tensor) -> float:
    if one.shape != many.shape:
        return math.inf
    first, second = one.float(), many.float()
    scale = max(_norm(first), _norm(second))
    distance = _norm(first - second)
    return distance / scale if scale else distance


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
