"""Compares the gradient of the trainer's own micro-batches with that of other micro-batches of the same rows.

No knowledge of the loss or the model is needed. Both passes start from the same weights, buffers, random state and
script state, and restore them. Dropout is off, and gradients are not synchronized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn, zeros_like

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import has_shards, tried_pass
from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.seam import instance_attribute, unsteered
from unsloth_multigpu.step.comparison import Difference
from unsloth_multigpu.step.sketch import difference, mean_of, names_of, sketch
from unsloth_multigpu.step.snapshot import Still, kept_training_state
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

# If both passes take less time than this, they are timed again: kernels compile in the first pass.
_TIMED_AGAIN_S = 20.0

MicroBatches = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class OrderDifference:
    """The difference of two orders' gradients, averaged over ranks, and the seconds of each on the slowest rank."""

    of_gradient: Difference
    one_s: float
    other_s: float


class OrderProof:
    """Compares two orders of completions of a trainer whose `training_step` takes what `_prepare_inputs` returns.

    Attributes:
        called: The wrapped model, the inputs and the number of tokens that `training_step` was called with.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager, beat: HeartbeatPage) -> None:
        self._trainer = trainer
        self._manager = manager
        self._beat = beat
        # Parameters used by a pass, if DDP searches for unused ones.
        self._used: list[nn.Parameter] = []
        self.called: tuple[Any, Any, Any] = (None, None, None)

    def compared(self, one: MicroBatches, other: MicroBatches, *, is_timed: bool) -> OrderDifference:
        """Runs both passes, over the same completions of all ranks in as many micro-batches. Collective.

        Raises:
            SetupError: The loss can be computed in the first order only.
        """
        mine, one_s = self.gradient(one)
        try:
            theirs, other_s = self.gradient(other)
            if is_timed and one_s + other_s < _TIMED_AGAIN_S:
                one_s, other_s = self.gradient(one)[1], self.gradient(other)[1]
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise SetupError(
                f"The loss cannot be computed of completions that are dealt by length ({type(error).__name__}: "
                f"{str(error)[:200]}).",
                hint="Set balance='off'.",
            ) from error
        finally:
            self._zero_used()
        ranks = self._manager.gather_floats([*mine, *theirs])
        ones, others = [row[: len(mine)] for row in ranks], [row[len(mine) :] for row in ranks]
        # Sharded gradients are means over ranks already. Values that are not finite have no mean.
        if not has_shards(self._trainer.model) and all(math.isfinite(value) for row in ranks for value in row):
            ones, others = [mean_of(ones)], [mean_of(others)]
        return OrderDifference(difference(ones, others, names_of(self._trainer.model)), one_s, other_s)

    def gradient(self, micro_batches: MicroBatches) -> tuple[list[float], float]:
        """Returns a sketch of this rank's gradient, and the seconds of the slowest rank. Collective."""
        trainer, (model, inputs, num_items) = self._trainer, self.called
        device, accelerator = trainer.args.device, trainer.accelerator
        is_synced_before = accelerator.gradient_state.sync_gradients
        training_step = unsteered(trainer.training_step)
        # DDP's wrapper would take this pass for a pass of the training.
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._manager.gather_floats([0.0])  # All ranks start at the same time.
        with ExitStack() as stack:
            for context in (kept_training_state(trainer), tried_pass(trainer.model), Still()):
                stack.enter_context(context)
            stack.callback(accelerator.gradient_state._set_sync_gradients, is_synced_before)
            stack.enter_context(instance_attribute(trainer, "compute_loss", unsteered(trainer.compute_loss)))
            begin = moment(device)
            for i, micro_batch in enumerate(micro_batches):
                self._beat.mark()
                is_last = i == len(micro_batches) - 1
                accelerator.gradient_state._set_sync_gradients(is_last)
                # Sharded ranks all compute the same gradient here, so its mean is unchanged.
                is_synced = is_last and has_shards(trainer.model)
                if is_synced:
                    # The loop may be within `no_sync`. Leaving such a context turns the reduction of shards on again:
                    # otherwise this gradient would be added to that of the next pass.
                    with accelerator.no_sync(model):
                        pass
                given = instance_attribute(trainer, "_prepare_inputs", lambda *_, of=micro_batch: dict(of))
                with given, nullcontext() if is_synced else accelerator.no_sync(model):
                    training_step(bare, inputs, num_items)
            seconds = Lap(begin, moment(device)).seconds()
            if getattr(model, "find_unused_parameters", False):
                self._used += [p for p in model.parameters() if p.grad is not None]
            found = sketch(trainer.model)
        return found, max(row[0] for row in self._manager.gather_floats([seconds]))

    def _zero_used(self) -> None:
        """Gives parameters of a pass a zero gradient: DDP takes them for used in its next all-reduce."""
        for parameter in self._used:
            if parameter.grad is None:
                parameter.grad = zeros_like(parameter)
        self._used = []
