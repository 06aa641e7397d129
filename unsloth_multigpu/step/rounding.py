"""How much rounding may change a gradient: bounds for each precision, and a measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from unsloth_multigpu.group.shards import part_of
from unsloth_multigpu.trainer_protocol import TrainerLike

# In another micro-batch, a row is computed by other kernels, and sums have another order. In fp32, the gradients of 17
# exact losses differed by at most 6e-7, those of inexact losses by at least 1.2e-4. fp16 and bf16 round each element
# with a relative error of up to 5e-4 and 4e-3.
FINE = 1e-5
_BOUNDS = {torch.float64: FINE, torch.float32: FINE, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TF32 = 5e-3
# A larger difference is never taken for rounding in fp32.
MOST_ROUNDING = 1e-3


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
    _invert_last_bits(model)
    try:
        yield
    finally:
        _invert_last_bits(model)


def _invert_last_bits(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            part_of(parameter.data).view(torch.int32).bitwise_xor_(1)
