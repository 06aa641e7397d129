"""Gradients averaged after the backward has ended. DDP averages them while the backward runs."""

from __future__ import annotations

import torch
from torch import nn

from unsloth_multigpu.strategies.sync import DEFAULT_BUCKET_MB, GradientSync


class AllReduceSync(GradientSync):
    """Every rank averages the gradients over all ranks and makes the same optimizer step.

    The same numbers as DDP to rounding. Nothing is sent while the backward computes. As with DDP, buffers follow rank
    0's, and a parameter that only some ranks used counts as zeros on the others.

    Args:
        model: See `GradientSync`.
        optimizer: See `GradientSync`.
        bucket_mb: MiB of one message. 0 = a message for each gradient, sent without a copy; else gradients are
            copied together and back.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, bucket_mb: float = DEFAULT_BUCKET_MB
    ) -> None:
        super().__init__(model, optimizer)
        self._bucket_mb = bucket_mb

    def after_backward(self) -> None:
        """Averages `.grad` over the ranks. Collective."""
        self.average(self.shared_gradients(), bucket_mb=self._bucket_mb)

    def after_step(self) -> None:
        """Gives every rank rank 0's buffers. Collective."""
        super().after_step()
        self.broadcast(self.buffers)
