"""Tries a trainer's loss on a few rows: is the loss of a micro-batch made up of the losses of its parts, and how?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.random_state import seeded_draws
from unsloth_multigpu.group.shards import can_pass_again, part_of, tried_pass, whole_of
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.step.memory import is_out_of_memory
from unsloth_multigpu.step.observe import LossObserver, is_linear_in_means
from unsloth_multigpu.step.one_process import counted_as_one_process
from unsloth_multigpu.step.samples import Sample
from unsloth_multigpu.step.snapshot import kept_training_state
from unsloth_multigpu.step.weighing import IGNORED, ROWS, SUM, TOKENS, candidates, count_rows, obstacle, weight_of
from unsloth_multigpu.trainer_protocol import TrainerLike

logger = get_logger(__name__)

# Elements of the parameters whose gradient is compared. Coefficients of rows are the same for all parameters.
_PROBED_ELEMENTS = 2**20
# Weights with equal losses for all rows hide how these are averaged. Then parameters are shifted by this much.
_SHIFT = 0.02
# Gradients of fp16 activations vanish below 6e-8.
_FP16_SCALE = 2.0**10
# Below this part of the bound, misfits do not tell two weighings apart.
_SAME = 0.1
# A loss below this is only rounding.
ZERO_LOSS = 1e-6
_TINY = 1e-30
_NO_SECOND_PASS = f"and sharded ranks cannot go on after a loss that raised with torch {torch.__version__}"
_NEWER = "Use torch 2.13 or newer, or leave shard out, or let each row's loss be computed alone; a batch norm's is not."


@dataclass(frozen=True)
class Bound:
    """Largest relative misfit of an exact weighing, which comes from rounding alone.

    Rows in smaller micro-batches are computed by other kernels and added up in another order. In fp32, exact losses of
    17 kinds had a misfit of 6e-7 at most and inexact ones of 1.2e-4 at least; the bound lies between. Activations of 8
    or 11 bits round by 4e-3 or 5e-4, of which the mean over tokens leaves less and a gradient, whose elements round by
    themselves, all.

    Args:
        value: Of the loss.
        gradient: Of the gradient, as the norm of the difference by the norm.
    """

    value: float
    gradient: float


_BOUNDS = {
    torch.float64: Bound(1e-5, 1e-5),
    torch.float32: Bound(1e-5, 1e-5),
    torch.float16: Bound(3e-3, 2e-2),
    torch.bfloat16: Bound(1e-2, 5e-2),
}
_TF32 = Bound(1e-3, 5e-3)


def rounding_bound(trainer: TrainerLike) -> Bound:
    """The bound of the lowest precision in which the trainer computes."""
    precision = getattr(trainer.accelerator, "mixed_precision", "no")
    found = {p.dtype for p in trainer.model.parameters()} & set(_BOUNDS)
    found |= {torch.float16} if precision == "fp16" else {torch.bfloat16} if precision in ("bf16", "fp8") else set()
    # Quantised weights are computed in the type of the others.
    bounds = [_BOUNDS[dtype] for dtype in found] or [_BOUNDS[torch.float32]]
    if trainer.args.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        bounds.append(_TF32)
    return max(bounds, key=lambda bound: bound.value)


@dataclass(frozen=True)
class Fit:
    """How well losses of parts make up the loss of the whole.

    Args:
        weighing: By which they fit best, see `weighing.candidates`; "" = none could be tried.
        value: Relative misfit of the loss.
        gradient: Relative misfit of the gradient; nan = it was not tried.
        norm_ratio: Norm of the gradient that the parts make up by that of the whole.
        class_weights: Of the classes, where labels are weighted by them.
        is_one_of_several: Another weighing of tokens or rows fits as well.
        is_certain: That it does not fit is known without a misfit.
        problem: Why it does not fit, in words; "" = it does.
    """

    weighing: str
    value: float = 0.0
    gradient: float = 0.0
    norm_ratio: float = 1.0
    class_weights: tuple[float, ...] = ()
    is_one_of_several: bool = False
    is_certain: bool = False
    problem: str = ""


class LossTrial:
    """Calls the trainer's loss on samples. Each call begins with the same state, and restores it.

    The model is in training mode, as when it trains: what depends on that is seen. Only dropout is off, whose masks
    depend on the place in a micro-batch.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        compute_loss: Its bound `compute_loss`, without what this package puts around it.
        is_own: It is of the script, and sees the number of processes of one process.

    Attributes:
        num_calls: How often the loss was called.
    """

    def __init__(self, trainer: TrainerLike, compute_loss: Callable[..., Any], *, is_own: bool = False) -> None:
        self._trainer = trainer
        self._is_own = is_own
        self._compute_loss = compute_loss
        self._probes = _probes(trainer.model)
        self._has_gradient = bool(self._probes)
        self._is_training = True
        self._shift = 0.0
        self.bound = rounding_bound(trainer)
        self.num_calls = 0

    def value(self, inputs: Any, num_items: int | None) -> float:
        """The loss of a micro-batch.

        Args:
            inputs: Collated, on the device.
            num_items: Labelled tokens that are said to be in the step; None = the loss is not told.
        """
        return self._measure(inputs, num_items, with_gradient=False).loss

    def value_after(self, before: Sequence[Any], inputs: Any, num_items: int | None) -> float:
        """The loss of a micro-batch behind calls with others, of which the state is kept; of all the same draws."""
        return self._call(inputs, num_items, with_gradient=False, seed=0, before=before).loss

    def fit(
        self, samples: Sequence[Sample], num_items: int | None, weighing: str = "", *, with_gradient: bool = True
    ) -> Fit:
        """The weighing by which the losses of parts make up the loss of the whole, in all samples.

        Args:
            samples: What it is tried on.
            num_items: See `value`.
            weighing: Only this one is tried; "" = all `candidates`.
            with_gradient: Gradients are compared as well, which reveal a loss that is not a mean even where the parts
                have nearly the same loss.
        """
        problem = next((sample.problem for sample in samples if sample.problem), "")
        if problem:
            return Fit(weighing or ROWS, math.nan, math.nan, is_certain=True, problem=problem)
        samples = [sample for sample in samples if len(sample.parts) > 1]
        if not samples:
            return Fit(weighing or ROWS, math.nan, math.nan, problem="no batch could be compared with its parts")
        why = next((why for s in samples for part in s.parts if (why := obstacle(part, weighing or ROWS))), "")
        if why:
            problem = f'it counts by "{weighing}", which cannot be computed for a part of it: {why}'
            return Fit(weighing, math.nan, math.nan, is_certain=True, problem=problem)
        found = self._fit(samples, num_items, weighing, with_gradient)
        if found.problem and self._is_random(samples[0].whole, num_items):
            # A model that draws more than dropout: judged without what it does in training alone.
            self._is_training = False
            found = self._fit(samples, num_items, weighing, with_gradient)
            self._is_training = True
        return found

    def _fit(self, samples: Sequence[Sample], num_items: int | None, weighing: str, with_gradient: bool) -> Fit:
        def measured_of(inputs: Any) -> _Measured:
            return self._measure(inputs, num_items, with_gradient=with_gradient)

        wholes = [measured_of(sample.whole) for sample in samples]
        told = [_told_apart(s) if w.ignores else s for s, w in zip(samples, wholes, strict=True)]
        wholes = [w if t is s else measured_of(t.whole) for t, s, w in zip(told, samples, wholes, strict=True)]
        samples = told
        try:
            measured = [(w, [measured_of(part) for part in s.parts]) for s, w in zip(samples, wholes, strict=True)]
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # Batch norm of one row, a loss that wants pairs.
            cannot = f"cannot be computed by itself ({type(error).__name__}: {str(error)[:200]})"
            if not can_pass_again(self._trainer.model):
                raise SetupError(f"A part of a micro-batch {cannot}, {_NO_SECOND_PASS}.", hint=_NEWER) from error
            return Fit(weighing or ROWS, math.nan, math.nan, problem=f"a part of it {cannot}")
        if all(whole.is_zero for whole, _ in measured) and not self._shift and self._probes:
            with self.moved_weights():
                return self._fit(samples, num_items, weighing, with_gradient)
        tables = {whole.class_weights for whole, _ in measured}
        table = tables.pop() if len(tables) == 1 else ()
        names = [weighing] if weighing else _offered(samples, len(table))
        fits = [self._judged(name, samples, measured, table) for name in names]
        misfits = [max(fit.value / self.bound.value, fit.gradient / self.bound.gradient) for fit in fits]
        # Of several that fit within rounding take the likeliest. If none fits, do not take an odd one by chance.
        near = max((2 if min(misfits) <= 1 else 10) * min(misfits), _SAME)
        best = next(fit for fit, misfit in zip(fits, misfits, strict=True) if misfit <= near)
        if not best.problem and not all(whole.is_linear for whole, _ in measured):
            problem = "it is not a sum of means but another function of them, so the weights of its rows change"
            return replace(best, problem=problem)
        return replace(best, is_one_of_several=sum(not fit.problem for fit in fits) > 1)

    def _judged(
        self,
        name: str,
        samples: Sequence[Sample],
        measured: Sequence[tuple[_Measured, list[_Measured]]],
        table: tuple[float, ...],
    ) -> Fit:
        value = gradient = 0.0
        ratio = 1.0
        for sample, (whole, parts) in zip(samples, measured, strict=True):
            weights = [weight_of(part, name, table) for part in sample.parts]
            total = 1.0 if name == SUM else sum(weights)
            if not total:
                return Fit(name, math.inf, math.inf, problem="no row of the sample counts")
            # A mean over nothing is NaN, and counts nothing.
            made = [(w / total, part) for w, part in zip(weights, parts, strict=True) if w]
            misfit, off, norm_ratio = _misfit(whole, made)
            value, gradient = max(value, misfit), max(gradient, off)
            ratio = norm_ratio if abs(math.log(norm_ratio)) > abs(math.log(ratio)) else ratio
        is_exact = value <= self.bound.value and gradient <= self.bound.gradient
        problem = "" if is_exact else "no weighted mean, and no sum, of the losses of its parts gives it"
        return Fit(name, value, gradient, ratio, table if "class weights" in name else (), problem=problem)

    def _is_random(self, inputs: Any, num_items: int | None) -> bool:
        first, second = (self._measure(inputs, num_items, with_gradient=False, seed=seed).loss for seed in (1, 2))
        return first != second

    def _measure(
        self,
        inputs: Any,
        num_items: int | None,
        *,
        with_gradient: bool = True,
        seed: int | None = None,
    ) -> _Measured:
        if with_gradient and self._has_gradient:
            try:
                return self._call(inputs, num_items, with_gradient=True, seed=seed)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not can_pass_again(self._trainer.model):
                    raise
                logger.info("the loss is tried without its gradient, for which memory is short")
                self._has_gradient = False
        return self._call(inputs, num_items, with_gradient=False, seed=seed)

    def _call(
        self,
        inputs: Any,
        num_items: int | None,
        *,
        with_gradient: bool,
        seed: int | None,
        before: Sequence[Any] = (),
    ) -> _Measured:
        trainer, args = self._trainer, self._trainer.args
        self.num_calls += 1
        count = {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items, device=args.device)}
        observed = LossObserver()
        with ExitStack() as stack:
            stack.enter_context(kept_training_state(trainer))
            stack.enter_context(self._shifted())
            stack.enter_context(torch.set_grad_enabled(with_gradient))
            stack.enter_context(tried_pass(trainer.model))
            stack.enter_context(counted_as_one_process(trainer) if self._is_own else nullcontext())
            trainer.model.train(self._is_training)
            # As in a step, see `StepFeed`.
            is_of_one = instance_attribute(args, "average_tokens_across_devices", False)
            with is_of_one, trainer.compute_loss_context_manager(), trainer.accelerator.autocast(), observed:
                for given in (*before, inputs):
                    with seeded_draws(seed) if seed is not None else nullcontext():
                        if seed is not None:
                            torch.manual_seed(seed)  # Accelerators as well.
                        loss = self._compute_loss(trainer.model, dict(given), **count)
            loss = loss[0] if isinstance(loss, tuple) else loss
            gradient, is_linear = None, True
            if with_gradient and loss.requires_grad and bool(torch.isfinite(loss)):
                is_linear = is_linear_in_means(loss, count_rows(inputs))
                gradient = self._gradient(loss)
            ignores = observed.ignores or _has_ignored(inputs)
            return _Measured(float(loss.detach()), gradient, is_linear, observed.class_weights, ignores)

    def _gradient(self, loss: torch.Tensor) -> torch.Tensor:
        scale = _FP16_SCALE if self._trainer.accelerator.mixed_precision == "fp16" else 1.0
        # Not torch.autograd.grad, which reentrant checkpointing refuses.
        (loss * scale).backward()
        gradients = [None if p.grad is None else whole_of(p.grad.detach()) for p in self._probes]
        parts = [
            torch.zeros(p.numel()) if gradient is None else gradient.cpu().reshape(-1)
            for p, gradient in zip(self._probes, gradients, strict=True)
        ]
        return torch.cat([part.double() for part in parts]) / scale

    @contextmanager
    def moved_weights(self) -> Iterator[None]:
        """Shifts the trainable weights while the context is open: where the loss is zero, nothing can be seen."""
        before, self._shift = self._shift, _SHIFT
        try:
            yield
        finally:
            self._shift = before

    @contextmanager
    def _shifted(self) -> Iterator[None]:
        """Moves the probed parameters during one call."""
        if not self._shift:
            yield
            return
        generator = torch.Generator().manual_seed(0)
        # Of sharded parameters each rank moves its part.
        probes = [part_of(p.detach()) for p in self._probes]
        kept = [p.clone() for p in probes]
        try:
            with torch.no_grad():
                for p in probes:
                    p.add_(torch.randn(p.shape, generator=generator).to(p) * self._shift)
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(probes, kept, strict=True):
                    p.copy_(value)


@dataclass(frozen=True)
class _Measured:
    """One call of the loss.

    Args:
        loss: Its value.
        gradient: Of the probed parameters, float64 on the CPU; None = not computed.
        is_linear: See `is_linear_in_means`.
        class_weights: Those that it was seen to use.
        ignores: Labels of -100 are left out.
    """

    loss: float
    gradient: torch.Tensor | None
    is_linear: bool = True
    class_weights: tuple[float, ...] = ()
    ignores: bool = False

    @property
    def is_zero(self) -> bool:
        """True if the loss is only rounding, as that of a student that begins as a copy of its teacher."""
        return abs(self.loss) < ZERO_LOSS


def _offered(samples: Sequence[Sample], num_classes: int) -> list[str]:
    """The candidates of all samples that can be computed for each part: padding gives parts widths of their own."""
    first, *others = ([*candidates(s.whole, num_classes)] for s in samples)
    parts = [part for s in samples for part in s.parts]
    common = [name for name in first if all(name in other for other in others)]
    return [name for name in common if not any(obstacle(part, name) for part in parts)]


def _misfit(whole: _Measured, made: Sequence[tuple[float, _Measured]]) -> tuple[float, float, float]:
    """Relative misfits of loss and gradient, and the ratio of the gradients' norms."""
    losses = [part.loss for _, part in made]
    if not made or not all(map(math.isfinite, (whole.loss, *losses))):
        return math.inf, math.inf, 1.0
    loss = math.fsum(share * part.loss for share, part in made)
    size = max(abs(whole.loss), math.fsum(abs(share * part.loss) for share, part in made), _TINY)
    value = abs(loss - whole.loss) / size
    gradients = [(share, part.gradient) for share, part in made if part.gradient is not None]
    if whole.gradient is None or len(gradients) < len(made):
        return value, 0.0, 1.0
    together = torch.stack([share * gradient for share, gradient in gradients]).sum(0)
    norm, norm_together = float(whole.gradient.norm()), float(together.norm())
    # The gradients of rows may cancel, but their rounding errors do not.
    size = max(norm, 1e-3 * math.fsum(abs(share) * float(g.norm()) for share, g in gradients), _TINY)
    off = float((together - whole.gradient).norm()) / size
    return value, off, (norm_together / norm if norm and norm_together else 1.0)


def _probes(model: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters near the loss, as many as fit."""
    found, left = [], _PROBED_ELEMENTS
    trainable = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    for parameter in reversed(trainable):
        if parameter.numel() <= left:
            found.append(parameter)
            left -= parameter.numel()
    return found or sorted(trainable, key=lambda p: p.numel())[:1]


def _told_apart(sample: Sample) -> Sample:
    """Removes labels of the last part if all parts have equally many: otherwise it cannot be seen what is averaged."""
    labels = sample.whole.get("labels") if isinstance(sample.whole, Mapping) else None
    parts = sample.parts
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return sample
    last = parts[-1].get("labels")
    if not isinstance(last, torch.Tensor) or last.dim() != labels.dim() or labels.shape[1] != last.shape[1]:
        return sample
    if any(obstacle(part, TOKENS) or part["labels"].dim() != labels.dim() for part in parts[:-1]):
        return sample
    if len({weight_of(part, TOKENS) / len(part["labels"]) for part in parts}) > 1:
        return sample
    labels = torch.cat([labels[: -len(last)], _without_half(labels[-len(last) :])])
    changed = {**parts[-1], "labels": _without_half(last)}
    return Sample({**sample.whole, "labels": labels}, (*parts[:-1], changed))


def _has_ignored(inputs: Any) -> bool:
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    return isinstance(labels, torch.Tensor) and bool((labels == IGNORED).any())


def _without_half(labels: torch.Tensor) -> torch.Tensor:
    """Rows that lose the first half of their labels: a prompt has none, and a row keeps one at least."""
    labelled = labels.ne(IGNORED)
    return labels.masked_fill(labelled & (labelled.cumsum(1) <= labelled.sum(1, keepdim=True) // 2), IGNORED)
