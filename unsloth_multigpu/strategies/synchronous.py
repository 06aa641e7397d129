"""Strategies that synchronize in every step, as DDP does: an all-reduce after the backward, and a parameter server."""

from __future__ import annotations

import math

import torch
from torch import nn

from unsloth_multigpu.strategies.sync import SERVER_RANK, GradientSync


class AllReduceSync(GradientSync):
    """Every rank averages the gradients over all ranks and makes the same optimizer step.

    The same numbers as DDP to rounding. Nothing is sent while the backward computes. As with DDP, buffers follow rank
    0's, and a parameter that only some ranks used counts as zeros on the others.
    """

    def after_backward(self) -> None:
        """Averages `.grad` over the ranks. Collective."""
        self.average(self.shared_gradients())

    def after_step(self) -> None:
        """Gives every rank rank 0's buffers. Collective."""
        super().after_step()
        self.broadcast(self.buffers)


class ParameterServerSync(GradientSync):
    """Rank 0, which is a worker as well, averages the gradients, steps, and sends the weights to the others.

    The same numbers as DDP to rounding. Only rank 0 holds optimizer state; the other ranks' optimizers see no gradient,
    so their steps do nothing, and the gradient norm of the step is rank 0's.

    Args:
        model: See `GradientSync`.
        optimizer: See `GradientSync`.
        is_loss_scaled: A GradScaler scales the loss. It wants a gradient on every rank, and its scale must stay the
            same on all; so each worker keeps one, of its smallest parameter: zeros, or NaN where rank 0's overflowed.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_loss_scaled: bool = False) -> None:
        super().__init__(model, optimizer)
        self._is_loss_scaled = is_loss_scaled

    def begin(self) -> None:
        """Gives every rank rank 0's weights and buffers; workers drop optimizer state that a checkpoint gave them."""
        super().begin()
        if self.rank != SERVER_RANK:
            self.optimizer.state.clear()

    def after_backward(self) -> None:
        """Averages the gradients on rank 0 and removes them on the others. Collective."""
        gradients = self.shared_gradients()
        self.average_on_server(gradients)
        if self.rank != SERVER_RANK:
            for parameter in self.parameters:
                parameter.grad = None
        if self._is_loss_scaled and gradients:
            self._share_overflow([g for g in gradients if g.numel()])

    def _share_overflow(self, gradients: list[torch.Tensor]) -> None:
        # The largest element times zero: zero, or NaN where an element is infinite or NaN.
        overflow = torch.nn.utils.get_total_norm(gradients, math.inf).float() * 0
        self.broadcast([overflow])
        if self.rank != SERVER_RANK:
            held = (p for group in self.optimizer.param_groups for p in group["params"])
            token = min((p for p in held if p.requires_grad and p.numel()), key=torch.Tensor.numel)
            token.grad = torch.zeros_like(token) + overflow

    def after_step(self) -> None:
        """Gives every rank rank 0's trained weights and buffers. Collective."""
        super().after_step()
        self.broadcast([*self.parameters, *self.buffers])
