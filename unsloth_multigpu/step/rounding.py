"""In which precision a device computes, and how much rounding may change a gradient: bounds, and a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from unsloth_multigpu.group.shards import part_of
from unsloth_multigpu.trainer_protocol import TrainerLike

# Rows in other micro-batches are computed by other kernels and added up in another order. In fp32, exact losses of 17
# kinds differed by 6e-7 at most and inexact ones by 1.2e-4 at least. Activations of fp16 and bf16 have relative errors
# of 5e-4 and 4e-3, and each element of a gradient is rounded by itself.
FINE = 1e-5
_BOUNDS = {torch.float64: FINE, torch.float32: FINE, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TF32 = 5e-3
# A larger difference is never taken for rounding in fp32.
MOST_ROUNDING = 1e-3


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no 64-bit numbers, as some of Intel's GPUs."""
    if device.type == "cpu":
        return torch.float64
    properties = torch.get_device_module(device).get_device_properties(device)
    return torch.float64 if getattr(properties, "has_fp64", True) else torch.float32


def rounding_bound(trainer: TrainerLike) -> float:
    """Largest norm of a difference of gradients by the norm, in the lowest precision that the trainer computes in."""
    precision = getattr(trainer.accelerator, "mixed_precision", "no")
    found = {p.dtype for p in trainer.model.parameters()} & set(_BOUNDS)
    found |= {torch.float16} if precision == "fp16" else {torch.bfloat16} if precision in ("bf16", "fp8") else set()
    # Quantised weights are computed in the type of the others.
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
    _invert_last_bits(model)
    try:
        yield
    finally:
        _invert_last_bits(model)


def _invert_last_bits(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            part_of(parameter.data).view(torch.int32).bitwise_xor_(1)
