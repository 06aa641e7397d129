"""Compares the gradients of two computations of a step: by sketches of few numbers, and a bound for rounding."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.group.shards import part_of
from unsloth_multigpu.part import TrainerLike

# The gradient of a single parameter may differ by this many times the bound for all parameters together.
_OF_ONE = 20.0
# A bound above this number is that of a precision lower than fp32.
_NOT_FINE = 1e-4
# Ranks may differ from one process by this many times the effect of a change of the weights' last bits.
_OF_LAST_BITS = 4.0
# In a micro-batch of another size, kernels and the order of sums differ. In fp32, the gradients of 17 exact losses
# differed by at most 6e-7, those of inexact losses by at least 1.2e-4. fp16 and bf16 round each element with a relative
# error of up to 5e-4 and 4e-3.
FINE = 1e-5
_BOUNDS = {torch.float64: FINE, torch.float32: FINE, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TF32 = 5e-3
# A larger difference is never taken for rounding in fp32.
MOST_ROUNDING = 1e-3
# Random projections of each tensor.
NUM_PROJECTIONS = 4
_WIDTH = 1 + NUM_PROJECTIONS
# Elements that are projected at once, which bounds the memory of a sketch.
_CHUNK = 2**18


@dataclass(frozen=True)
class Difference:
    """The difference of two gradients.

    Args:
        norm, other_norm: Norms of the two gradients.
        off: Norm of their difference divided by `norm`; inf if only one of them is not finite, nan if both are not.
        worst: The parameter whose gradient has the largest relative difference, `worst_off`.
    """

    norm: float
    other_norm: float
    off: float
    worst: str = ""
    worst_off: float = 0.0

    def is_within(self, bound: float) -> bool:
        """True if the gradients are equal up to rounding, or both are not finite."""
        return math.isnan(self.off) or (self.off <= bound and not self.worst_off > _OF_ONE * bound)


def speed_in_words(one_s: float, dealt_s: float) -> str:
    """Describes a ratio of seconds: "1.90 times as fast" or "1.90 times slower"."""
    return f"{one_s / dealt_s:.2f} times as fast" if dealt_s <= one_s else f"{dealt_s / one_s:.2f} times slower"


def times_in_words(one_s: float, dealt_s: float, num_ranks: int) -> str:
    """Describes the times of a step: "2.41 s as one process, 1.27 s on 2 ranks (1.90 times as fast)"."""
    ranks = f"{num_ranks} ranks" if num_ranks > 1 else "one rank, as planned"
    return f"{one_s:.3g} s as one process, {dealt_s:.3g} s on {ranks} ({speed_in_words(one_s, dealt_s)})"


@dataclass(frozen=True)
class Comparison:
    """The comparison of a step, counted from 1, on the ranks with the same step in one process.

    Args:
        num_compared: Micro-batches of one process that were compared, of `num_references`.
        difference: Difference of the gradients; not a number if they were not compared.
        bound: Largest relative difference due to rounding in this precision.
        rounding: Relative difference of one process from itself if the last bits of the weights change; nan = not
            measured, since the difference is within the bound, or far above it.
        one_s: Seconds of these micro-batches in one process; nan = not measured.
        dealt_s: Seconds on the ranks.
        unproven: Why the gradients were not compared; "" = they were.
        draws: What draws random numbers in a step. In the training these differ from those of one process; the
            comparison uses equal ones.
        counts: Numbers on the script's trainer that differ from those of one process, and may change a later step.
    """

    step: int
    num_ranks: int
    num_compared: int
    num_references: int
    difference: Difference = Difference(math.nan, math.nan, math.nan)
    bound: float = math.nan
    rounding: float = math.nan
    one_s: float = math.nan
    dealt_s: float = math.nan
    unproven: str = ""
    draws: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if the gradients are equal up to rounding."""
        is_rounding = self.difference.off <= _OF_LAST_BITS * self.rounding
        return not self.unproven and (is_rounding or self.difference.is_within(self.bound))

    @property
    def _what(self) -> str:
        return "first step" if self.step == 1 else f"step {self.step}"

    @property
    def _is_timed(self) -> bool:
        return math.isfinite(self.one_s) and self.dealt_s > 0

    def in_short(self) -> str:
        """Returns a short form: "first step: equal, 1.90 times as fast", "first step: differs by 3.1e-02"."""
        if self.unproven:
            return f"{self._what}: not compared"
        times = f", {speed_in_words(self.one_s, self.dealt_s)}" if self._is_timed else ""
        return f"{self._what}: {'equal' if self.is_exact else f'differs by {self.difference.off:.1e}'}{times}"

    def __str__(self) -> str:
        what = self._what
        if self.num_compared < self.num_references:
            what += f", {self.num_compared} of {self.num_references} micro-batches"
        if self.unproven:
            return f"{what}: not compared with one process: {self.unproven}"
        seconds = ""
        if self._is_timed:
            seconds = f"forward and backward {times_in_words(self.one_s, self.dealt_s, self.num_ranks)}, "
        size = "equal gradient, differs by" if self.is_exact else "the gradient differs by"
        rounding = "" if math.isnan(self.rounding) else f" (rounding changes it by {self.rounding:.1e})"
        if self.is_exact and self.bound > _NOT_FINE:
            rounding = f" (rounding in this precision: up to {self.bound:.0e})"
        draws = f"; drawn anew on each rank: {', '.join(self.draws)}" if self.draws and self.num_ranks > 1 else ""
        is_counted = self.counts and self.is_exact  # Else a warning says what may be done.
        counts = f"; counted by each rank for itself: {', '.join(self.counts)}" if is_counted else ""
        return f"{what}: {seconds}{size} {self.difference.off:.1e}{rounding}{draws}{counts}"

    def values(self) -> dict[str, Any]:
        """Returns JSON values for files and reports; None for numbers that are not finite."""
        numbers = {
            "difference": self.difference.off,
            "gradient_norm": self.difference.norm,
            "one_process_s": self.one_s,
            "dealt_s": self.dealt_s,
            "bound": self.bound,
            "rounding": self.rounding,
        }
        return {
            "step": self.step,
            "ranks": self.num_ranks,
            "micro_batches": [self.num_compared, self.num_references],
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "is_exact": self.is_exact,
            "not_compared": self.unproven,
            "draws": list(self.draws),
            "counts": list(self.counts),
        }


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns float64, or float32 for devices without 64-bit numbers, such as some GPUs of Intel."""
    if device.type == "cpu":
        return torch.float64
    properties = torch.get_device_module(device).get_device_properties(device)
    return torch.float64 if getattr(properties, "has_fp64", True) else torch.float32


def rounding_bound(trainer: TrainerLike) -> float:
    """Returns the largest relative difference of gradients due to rounding, in the lowest precision that is used."""
    precision = getattr(trainer.accelerator, "mixed_precision", "no")
    found = {p.dtype for p in trainer.model.parameters()} & set(_BOUNDS)
    found |= {torch.float16} if precision == "fp16" else {torch.bfloat16} if precision in ("bf16", "fp8") else set()
    # Quantized weights are dequantized to the type of the other weights.
    bounds = [_BOUNDS[dtype] for dtype in found] or [FINE]
    if trainer.args.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        bounds.append(_TF32)
    return max(bounds)


@contextmanager
def last_bits_changed(model: nn.Module) -> Iterator[None]:
    """Inverts the last bit of each fp32 weight while the context is open.

    A gradient computed meanwhile differs from the correct one by rounding alone: by more than usual if it is a small
    difference of large terms. No copy of the weights is made.
    """
    bits = [part_of(p.data).view(torch.int32) for p in model.parameters() if p.dtype == torch.float32]
    for part in bits:
        part.bitwise_xor_(1)
    try:
        yield
    finally:
        for part in bits:
            part.bitwise_xor_(1)


def sketch(model: nn.Module) -> list[float]:
    """Returns the norm and `NUM_PROJECTIONS` random projections of each trained parameter's gradient, as a flat list.

    A projection is a sum with random signs. The mean square of the projections of a difference estimates the square of
    its norm. All ranks use the same signs, so the projections of a mean are the means of the projections.
    For a sharded parameter, this is the sketch of this rank's part.
    """
    rows = [_sketch_of(p.grad, p.device) for p in model.parameters() if p.requires_grad]
    if not rows:
        return []
    # One wait for the device.
    return [float(value) for value in torch.stack([row.to(rows[0].device) for row in rows]).reshape(-1).tolist()]


def sketch_of(tensor: torch.Tensor) -> list[float]:
    """Returns a sketch of one tensor that is not a gradient."""
    return [float(value) for value in _sketch_of(tensor, tensor.device).tolist()]


def names_of(model: nn.Module) -> list[str]:
    """Returns the names of the parameters in a sketch, in its order."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def difference_of_means(
    ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]], names: Sequence[str]
) -> Difference:
    """Compares the means over the ranks of two gradients, by the sketches of each rank."""
    # Values that are not finite have no mean.
    if all(math.isfinite(value) for row in (*ones, *others) for value in row):
        ones, others = [mean_of(ones)], [mean_of(others)]
    return difference(ones, others, names)


def mean_of(sketches: Sequence[Sequence[float]]) -> list[float]:
    """Returns the sketch of the mean of some gradients, with norms estimated from the projections."""
    mean = [math.fsum(values) / len(sketches) for values in zip(*sketches, strict=True)]
    for k in range(0, len(mean), _WIDTH):
        mean[k] = math.hypot(*mean[k + 1 : k + _WIDTH]) / math.sqrt(NUM_PROJECTIONS)
    return mean


def difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], names: Sequence[str]) -> Difference:
    """Compares two gradients by the sketches of their parts: of all ranks if they are sharded, otherwise of one."""
    squares = [0.0] * len(names)
    norms, other_norms = list(squares), list(squares)
    for mine, theirs in zip(one, other, strict=True):
        for k in range(len(names)):
            a, b = mine[k * _WIDTH : (k + 1) * _WIDTH], theirs[k * _WIDTH : (k + 1) * _WIDTH]
            projected = sum((x - y) ** 2 for x, y in zip(a[1:], b[1:], strict=True)) / NUM_PROJECTIONS
            squares[k] += max(projected, (a[0] - b[0]) ** 2)
            norms[k] += a[0] ** 2
            other_norms[k] += b[0] ** 2
    norm, other_norm = math.sqrt(sum(norms)), math.sqrt(sum(other_norms))
    if not (math.isfinite(norm) and math.isfinite(other_norm)):
        is_alike = not math.isfinite(norm) and not math.isfinite(other_norm)
        return Difference(norm, other_norm, math.nan if is_alike else math.inf, "", math.nan)
    size = norm or other_norm
    if not size:
        return Difference(0.0, 0.0, 0.0)
    # A gradient that is zero in theory, such as that of a key's bias, consists of rounding errors.
    floor = 1e-3 * size
    own = [math.sqrt(d) / (math.sqrt(n) + floor) for d, n in zip(squares, norms, strict=True)]
    worst = max(range(len(names)), key=own.__getitem__)
    return Difference(norm, other_norm, math.sqrt(sum(squares)) / size, names[worst], own[worst])


def _sketch_of(given: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    gradient = None if given is None else part_of(given.detach())
    dtype = sum_dtype(device)
    found = torch.zeros(_WIDTH, dtype=dtype, device=device)
    if gradient is None or not gradient.numel():
        return found
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    found[0] = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    for sign, chunk in _signed(gradient.reshape(-1)):
        signs = _signs(chunk.device)[:, : len(chunk)]
        found[1:] += sign * torch.stack([(chunk * row).sum(dtype=dtype) for row in signs])
    return found


def _signed(flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields chunks of a tensor, each with a random sign for each projection."""
    generator = torch.Generator().manual_seed(len(flat))
    for start in range(0, len(flat), _CHUNK):
        sign = torch.randint(0, 2, (NUM_PROJECTIONS,), generator=generator) * 2 - 1
        chunk = flat[start : start + _CHUNK]
        yield sign.to(chunk.device), chunk.to(torch.promote_types(chunk.dtype, torch.float32))


@functools.cache
def _signs(device: torch.device) -> torch.Tensor:
    """Returns random signs of shape (projections, `_CHUNK`), one byte each. They stay on the device."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (NUM_PROJECTIONS, _CHUNK), generator=generator, dtype=torch.int8)
    return (bits * 2 - 1).to(device)
