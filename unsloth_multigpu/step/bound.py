"""By how much rounding alone may change a gradient."""

from __future__ import annotations

import torch

from unsloth_multigpu.trainer_protocol import TrainerLike

# Rows in other micro-batches are computed by other kernels and added up in another order. In fp32, exact losses of 17
# kinds differed by 6e-7 at most and inexact ones by 1.2e-4 at least; the bound lies between. Activations of 8 or 11
# bits round by 4e-3 or 5e-4, and each element of a gradient by itself.
_BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TF32 = 5e-3


def rounding_bound(trainer: TrainerLike) -> float:
    """Largest norm of a difference of gradients by the norm, in the lowest precision that the trainer computes in."""
    precision = getattr(trainer.accelerator, "mixed_precision", "no")
    found = {p.dtype for p in trainer.model.parameters()} & set(_BOUNDS)
    found |= {torch.float16} if precision == "fp16" else {torch.bfloat16} if precision in ("bf16", "fp8") else set()
    # Quantised weights are computed in the type of the others.
    bounds = [_BOUNDS[dtype] for dtype in found] or [_BOUNDS[torch.float32]]
    if trainer.args.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        bounds.append(_TF32)
    return max(bounds)
