"""Do one process and several ranks train the same? A decision over what both runs have left."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unsloth_multigpu.step.comparison import difference
from unsloth_multigpu.tools.verify.reasons import FINE

# Facts that must be equal in both runs: otherwise they are two different trainings.
_SAME_FACTS = ("device", "rounding", "optimizer", "trainer")
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
        compared: What the ranks' own comparison with one process has found, see `step.comparison`; empty without it.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    samples: Counter[str]
    compared: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """What a run has left.

    Args:
        steps: In their order.
        gradient_shares: For each trained tensor, its largest share of a step's gradient norm.
        updates: For each trained tensor, a sketch of what the training has added to it, and whether more than rounding
            decided which elements moved.
        facts: Device, versions and the like, see `tools.verify.recorder`.
        sources: Reasons for a difference that is no fault: name, found, advice.
    """

    steps: tuple[TrainedStep, ...]
    gradient_shares: Mapping[str, float]
    updates: Mapping[str, tuple[Sequence[float], bool]]
    facts: Mapping[str, Any]
    sources: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Bounds:
    """Largest differences that rounding explains, between two runs. Those within a step: see `step.bound`.

    Args:
        loss: Relative to the loss or to 1, whichever is larger: some losses are zero on average.
        grad_norm: Relative.
        weights: L2 norm of the difference of a tensor's updates relative to that of one process. An update is what the
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
    """Both runs' figures of one step. Differences are 0 where both runs have no figure, infinite where one has none.

    Args:
        compared: `TrainedStep.compared` of the ranks: both gradients from the same weights.
    """

    step: int
    num_samples: tuple[int, int]
    has_same_samples: bool
    loss: tuple[float | None, float | None]
    loss_difference: float
    grad_norm: tuple[float | None, float | None]
    grad_norm_difference: float
    compared: Mapping[str, Any]

    @property
    def is_compared(self) -> bool:
        """The gradients from the same weights were compared."""
        return bool(self.compared) and not self.compared["not_compared"]


@dataclass(frozen=True)
class WeightDifference:
    """What the training has added to one tensor, up to the end of the last step.

    Args:
        name: Of the parameter.
        update_norm: L2 norm of the update in both runs; None where a run has no such tensor.
        relative: L2 norm of the difference of the updates, relative to that of one process, as sketches estimate it.
        counts: False where both updates are 0 or noise.
    """

    name: str
    update_norm: tuple[float | None, float | None]
    relative: float
    counts: bool


@dataclass(frozen=True)
class Agreement:
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

    @property
    def times(self) -> tuple[float, float] | None:
        """Median seconds of a step's forward and backward passes, as one process and on the ranks; None = not known."""
        timed = [(s.compared["one_process_s"], s.compared["dealt_s"]) for s in self.steps if s.is_compared]
        pairs = [(one, dealt) for one, dealt in timed if one and dealt]
        return (statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)) if pairs else None


def bounds_for(rounding: float, optimizer: str) -> Bounds:
    """The bounds of a training.

    Args:
        rounding: By how much rounding may change a gradient, see `step.bound`.
        optimizer: `TrainingArguments.optim`.
    """
    # Measured without a fault, tiny models on 2 and 3 ranks: in fp32 gradient norms differ by 7e-7, updates of LoRA
    # weights by 1.3e-4 (the first steps of Adam are signs of gradients) and of all weights by 7e-5, with learning rates
    # from 1e-3 down to 1e-6 with warm-up. Real models add up more numbers.
    bounds = Bounds(loss=1e-4, grad_norm=1e-4, weights=1e-3, noise=1e-6)
    if rounding > FINE:
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
    for values in first["steps"]:
        same_step = [s for record in records for s in record["steps"] if s["step"] == values["step"]]
        samples = sum((Counter(s["samples"]) for s in same_step), Counter[str]())
        steps.append(TrainedStep(**{**values, "samples": samples}))
    return RunRecord(tuple(steps), first["gradient_shares"], first["updates"], first["facts"], tuple(first["sources"]))


def compare(one: RunRecord, many: RunRecord) -> Agreement:
    """Judges both runs' steps and final weights.

    Args:
        one: The one-process run.
        many: The run of several ranks.
    """
    roundings = (one.facts["rounding"], many.facts["rounding"])
    bounds = bounds_for(max(roundings), many.facts["optimizer"])
    steps = tuple(_compare_step(a, b) for a, b in zip(one.steps, many.steps, strict=False))
    weights = tuple(_compare_updates(one, many, bounds.noise))
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
    return Agreement(steps, weights, bounds, tuple(reasons))


def _compare_step(one: TrainedStep, many: TrainedStep) -> StepDifference:
    return StepDifference(
        step=one.step,
        num_samples=(one.samples.total(), many.samples.total()),
        has_same_samples=one.samples == many.samples,
        loss=(one.loss, many.loss),
        loss_difference=_relative(one.loss, many.loss, at_least=1.0),
        grad_norm=(one.grad_norm, many.grad_norm),
        grad_norm_difference=_relative(one.grad_norm, many.grad_norm),
        compared=many.compared,
    )


def _compare_updates(one: RunRecord, many: RunRecord, noise: float) -> list[WeightDifference]:
    """Of each trained tensor, largest difference that counts first."""
    found = []
    for name in sorted({*one.updates, *many.updates}):
        if name not in one.updates or name not in many.updates:
            found.append(WeightDifference(name, (None, None), math.inf, True))
            continue
        (first, has_moved), (second, has_moved_too) = one.updates[name], many.updates[name]
        off = difference([first], [second], [name]).off
        counts = one.gradient_shares.get(name, 1.0) >= noise and (has_moved or has_moved_too)
        # NaN cannot be sorted.
        found.append(WeightDifference(name, (first[0], second[0]), math.inf if math.isnan(off) else off, counts))
    return sorted(found, key=lambda d: (not d.counts, -d.relative))


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
    if step.is_compared and not step.compared["is_exact"]:
        off, bound = step.compared["difference"], step.compared["bound"]
        size = "is not finite in one of them" if off is None else f"differs by {off:.1e} (bound {bound:.0e})"
        reasons.append(f"step {step.step}: the gradient from the same weights, as one process and as dealt, {size}")
    for name, (one, many), by, bound in (
        ("loss", step.loss, step.loss_difference, bounds.loss),
        ("gradient norm", step.grad_norm, step.grad_norm_difference, bounds.grad_norm),
    ):
        if not by <= bound:
            shown = " and ".join("none" if value is None else f"{value:.6g}" for value in (one, many))
            reasons.append(
                f"step {step.step}: {name} {shown} on one process and on the ranks, "
                f"difference {by:.1e} (bound {bound:.0e})"
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
