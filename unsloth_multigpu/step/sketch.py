"""Compares gradients by sketches, a few numbers for each tensor, so that no gradient is kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from unsloth_multigpu.group.shards import part_of
from unsloth_multigpu.step.comparison import Difference
from unsloth_multigpu.step.rounding import sum_dtype

# Random projections of each tensor.
NUM_PROJECTIONS = 4
_WIDTH = 1 + NUM_PROJECTIONS
# Elements that are projected at once, which bounds the memory of a sketch.
_CHUNK = 2**18


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
