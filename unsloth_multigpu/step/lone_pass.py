"""Computes the gradient of micro-batches on one rank, without DDP, for a comparison."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from unsloth_multigpu.group.shards import has_shards
from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.step.sketch import sketch
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

# If both passes of a comparison take less time than this, they are timed again: kernels compile in the first one.
TIMED_AGAIN_S = 20.0
# Errors of code that computes a micro-batch, which a comparison reports.
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


class LonePass:
    """Computes gradients that are neither synchronized nor trained. The caller restores the state of the training."""

    def __init__(self, trainer: TrainerLike, beat: HeartbeatPage) -> None:
        self._trainer = trainer
        self._beat = beat
        # Parameters that got a gradient, if DDP searches for unused ones.
        self._used: list[nn.Parameter] = []

    def gradient(
        self, model: nn.Module, num_micro_batches: int, compute: Callable[[nn.Module, int], object]
    ) -> tuple[list[float], float]:
        """Computes micro-batches one after the other.

        Args:
            model: The wrapped model of the training.
            compute: Runs forward and backward pass, given the model without DDP's wrapper and the micro-batch's index.

        Returns:
            A sketch of the gradient, and the seconds on this rank.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        device, gradient_state = trainer.args.device, accelerator.gradient_state
        before = gradient_state.sync_gradients
        # DDP's wrapper would take this pass for one of the training. In one process there is none.
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        begin = moment(device)
        try:
            for i in range(num_micro_batches):
                is_last = i == num_micro_batches - 1
                gradient_state._set_sync_gradients(is_last)
                # Sharded ranks all compute the same gradient here, so its mean is unchanged.
                is_synced = is_last and has_shards(trainer.model)
                if is_synced:
                    # The loop may be within `no_sync`. Leaving such a context turns the reduction of shards on again:
                    # otherwise this gradient would be added to that of the next pass.
                    with accelerator.no_sync(model):
                        pass
                self._beat.mark(micro_batch=i)
                with nullcontext() if is_synced else accelerator.no_sync(model):
                    compute(bare, i)
        finally:
            gradient_state._set_sync_gradients(before)
        seconds = Lap(begin, moment(device)).seconds()
        if getattr(model, "find_unused_parameters", False):
            self._used += [p for p in model.parameters() if p.grad is not None]
        return sketch(trainer.model), seconds

    def zero_used(self) -> None:
        """Gives parameters of earlier passes a zero gradient: DDP takes them for used in its next all-reduce."""
        for parameter in self._used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def end(self) -> None:
        """Ends a comparison, after the gradients of the training are restored."""
        self.zero_used()
        self._used.clear()
