"""Do one process and several ranks train the same? A decision over what both runs have left."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unsloth_multigpu.report import RankReport

# Facts that must be equal in both runs: otherwise they are two different trainings.
_SAME_FACTS = ("device", "precision", "optimizer", "trainer")
# A tensor of which fewer elements moved, and not nearly all, is left out: in bf16 weights a small learning rate is
# lost in most elements by rounding, and in which of them is by chance. Measured: 73 of 4096 moved, updates differ by
# 0.13; from 300 of 4096 on by less than 0.08.
_MIN_MOVED = 500
_NEARLY_ALL = 0.9
_NOTHING = "nothing could be compared"
_TOO_EARLY = "the first steps of fp16 overflow, and a warm-up may begin at 0: raise --steps"


@dataclass(frozen=True)
class TrainedStep:
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
        facts: Device, precision, versions and the like, see `tools.verify.recorder`.
        ranks: What each rank has measured; none where the training was not measured.
    """

    steps: tuple[TrainedStep, ...]
    gradient_shares: dict[str, float]
    facts: dict[str, Any]
    ranks: tuple[RankReport, ...] = ()


@dataclass(frozen=True)
class Bounds:
    """Largest differences that rounding explains.

    Args:
        loss: Relative to the loss or to 1, whichever is larger: some losses are zero on average.
        grad_norm: Relative.
        weights: L2 norm of the difference of a tensor's updates relative to the larger update. An update is what the
            training has added to the weights since it began.
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
    """What the training has added to one tensor, up to the end of the last step.

    Args:
        name: Of the parameter.
        update_norm: L2 norm of the update in both runs; None where a run has no such tensor.
        relative: L2 norm of the difference of the updates, relative to the larger one.
        counts: False where both updates are 0 or noise.
    """

    name: str
    update_norm: tuple[float | None, float | None]
    relative: float
    counts: bool


@dataclass(frozen=True)
class Comparison:
    """The verdict: `reasons` tells what disagrees or is missing, in the order in which it came; empty = they agree."""

    steps: tuple[StepDifference, ...]
    weights: tuple[WeightDifference, ...]
    bounds: Bounds
    reasons: tuple[str, ...]

    @property
    def agree(self) -> bool:
        """True where every figure is within its bound."""
        return not self.reasons

    @property
    def compared_nothing(self) -> bool:
        """True where no figure disagrees, but what is needed for a verdict is not there."""
        return bool(self.reasons) and all(_NOTHING in reason for reason in self.reasons)


def bounds_for(precision: str, optimizer: str) -> Bounds:
    """The bounds of a training.

    Args:
        precision: "fp32", "tf32", "fp16" or "bf16".
        optimizer: `TrainingArguments.optim`.
    """
    # Measured without a fault, tiny models on 2 and 3 ranks: in fp32 gradient norms differ by 7e-7, updates of LoRA
    # weights by 1.3e-4 (the first steps of Adam are signs of gradients) and of all weights by 7e-5, with learning rates
    # from 1e-3 down to 1e-6 with warm-up. Real models add up more numbers.
    bounds = Bounds(loss=1e-4, grad_norm=1e-4, weights=1e-3, noise=1e-6)
    if precision != "fp32":
        # Measured in bf16: gradient norm 2.5e-3, updates of LoRA weights 5.6e-2, of all weights 7e-2 where these are
        # bf16 and 3e-2 where only the arithmetic is.
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
        steps.append(TrainedStep(figures["step"], figures["loss"], figures["grad_norm"], samples))
    ranks = tuple(RankReport(**values) for values in first["ranks"])
    return RunRecord(tuple(steps), first["gradient_shares"], first["facts"], ranks)


def compare_updates(one: Path, many: Path, shares: dict[str, float], noise: float) -> list[WeightDifference]:
    """Compares two safetensors files with the updates of the trained weights, largest difference that counts first.

    Args:
        one: File of the one-process run.
        many: File of rank 0 of the other.
        shares: `RunRecord.gradient_shares`.
        noise: `Bounds.noise`.
    """
    from safetensors import safe_open

    differences = []
    with safe_open(one, "pt") as first, safe_open(many, "pt") as second:
        names = (set(first.keys()), set(second.keys()))
        for name in sorted(names[0] | names[1]):
            if name not in names[0] & names[1]:
                differences.append(WeightDifference(name, (None, None), math.inf, True))
                continue
            updates = (first.get_tensor(name), second.get_tensor(name))
            norms = (_norm(updates[0]), _norm(updates[1]))
            counts = shares.get(name, 1.0) >= noise and any(_moved(update) for update in updates)
            differences.append(WeightDifference(name, norms, _relative_distance(*updates), counts))
    return sorted(differences, key=lambda d: (not d.counts, -d.relative))


def compare(one: RunRecord, many: RunRecord, weights: Sequence[WeightDifference], bounds: Bounds) -> Comparison:
    """Judges both runs' steps and final weights.

    Args:
        one: The one-process run.
        many: The run of several ranks.
        weights: Largest difference that counts first, see `compare_updates`.
        bounds: What is allowed.
    """
    steps = tuple(_compare_step(a, b) for a, b in zip(one.steps, many.steps, strict=False))
    reasons = [
        f"{name}: {one.facts[name]} in one process, {many.facts[name]} in the ranks"
        for name in _SAME_FACTS
        if one.facts[name] != many.facts[name]
    ]
    reasons += [reason for step in steps for reason in _reasons_of_step(step, bounds)]
    if len(one.steps) != len(many.steps):
        reasons.append(f"one process took {len(one.steps)} steps, the ranks {len(many.steps)}")
    wrong = [w for w in weights if w.counts and not w.relative <= bounds.weights]
    if wrong:
        reasons.append(
            f"weights: the updates of {len(wrong)} of {len(weights)} tensors differ, "
            f"{wrong[0].name} by {wrong[0].relative:.1e} (bound {bounds.weights:.0e})"
        )
    reasons += _missing(steps, weights)
    return Comparison(steps, tuple(weights), bounds, tuple(reasons))


def _compare_step(one: TrainedStep, many: TrainedStep) -> StepDifference:
    return StepDifference(
        step=one.step,
        num_samples=(one.samples.total(), many.samples.total()),
        has_same_samples=one.samples == many.samples,
        loss=(one.loss, many.loss),
        loss_difference=_relative(one.loss, many.loss, at_least=1.0),
        grad_norm=(one.grad_norm, many.grad_norm),
        grad_norm_difference=_relative(one.grad_norm, many.grad_norm),
    )


def _missing(steps: Sequence[StepDifference], weights: Sequence[WeightDifference]) -> Iterator[str]:
    """What no verdict can do without. Two runs that have nothing are equal, too."""
    for step in steps:
        figures = {"loss": step.loss, "gradient norm": step.grad_norm}
        lacking = [name for name, both in figures.items() if both == (None, None)]
        if step.num_samples == (0, 0):
            lacking.insert(0, "sample (the trainer must call training_step with them)")
        yield from (f"step {step.step}: {_NOTHING}, neither run has a {name}" for name in lacking)
    if not any(all(norm is not None and 0 < norm < math.inf for norm in step.grad_norm) for step in steps):
        yield f"{_NOTHING}: no step has a gradient norm above 0 that is a number; {_TOO_EARLY}"
    if not any(weight.counts for weight in weights):
        yield f"{_NOTHING}: no weights were moved; {_TOO_EARLY}"


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
    relative = distance / scale if scale else distance
    # NaN cannot be sorted.
    return math.inf if math.isnan(relative) else relative


def _moved(update: torch.Tensor) -> bool:
    """True if more than rounding decided which elements moved; an update that is no number did."""
    num_moved = int(torch.count_nonzero(update))
    return num_moved > 0 and (num_moved >= _MIN_MOVED or num_moved >= _NEARLY_ALL * update.numel())


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
