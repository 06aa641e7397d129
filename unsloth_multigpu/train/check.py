"""Checks each step of one training: is its gradient finite, has every rank a batch, was there enough memory?"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import DivergenceError, NonFiniteGradientError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import clip_parts, has_shards, is_sharded
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.memory import advice, explain, is_out_of_memory, size_of
from unsloth_multigpu.train.gradient import (
    SkippedSteps,
    describe,
    not_finite_losses,
    not_finite_parameters,
    total_norm,
)
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

logger = get_logger(__name__)


class StepCheck(Part):
    """Follows one training by methods on the one trainer object.

    Where the gradients of all ranks meet before the optimizer steps, all have the same one and decide alike without
    asking each other; else each rank judges its own before it is sent. A scaler of fp16 losses does it itself.

    Cost: the gradient norm, which clipping needs anyway, is read: the device is waited for once per step, where Hugging
    Face's loop has just waited for the loss.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        steps: What chooses the samples, if that is ours.
    """

    place = "check"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, steps: StepFeed) -> None:
        self._trainer = trainer
        self._manager = manager
        self._on_nan = manager.config.on_nan
        self._rank = manager.identity.rank
        self._is_shared = manager.config.strategy.has_one_gradient or manager.identity.world_size == 1
        self._skipped = SkippedSteps()
        self._losses: list[Any] = []
        self._is_judged = self._is_skipped = False
        self._place = ""
        self._is_evaluation = False
        self._batches = BatchCount(trainer, manager, steps)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Explains where the memory was not enough."""
        self._batches.begin()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                self._explain(error)
            raise

    def overrides(self) -> dict[str, Override]:
        return {
            "compute_loss": self._compute_loss,
            "training_step": self._training_step,
            "get_batch_samples": self._batches.batch_samples,
            "clip_grad_norm_": self._clip,
        }

    def is_needed(self, seam: str) -> bool:
        # A script's own training_step may compute its loss by itself. The step feed checks whether that works.
        return seam != "compute_loss"

    @property
    def _judges(self) -> bool:
        return self._on_nan != "off" and self._trainer.accelerator.scaler is None

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1

    def _compute_loss(self, original: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kw: Any) -> Any:
        """`Trainer.compute_loss`: keeps the loss of each micro-batch of the step."""
        size = size_of(inputs)
        self._is_evaluation = not model.training
        place = "a batch of the evaluation" if self._is_evaluation else f"micro-batch {len(self._losses)}"
        self._place = f"{place} of step {self._step}" + (f" ({size})" if size else "")
        result = original(model, inputs, *args, **kw)
        loss = result[0] if isinstance(result, tuple) else result
        if model.training and loss.requires_grad:
            self._losses.append(loss.detach())
        return result

    def _clip(self, original: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """`Accelerator.clip_grad_norm_`: the norm is judged between its two halves.

        Clipping by a norm of NaN would spoil every gradient, and hide which parameter it came from.
        """
        parameters = list(parameters)
        if not self._judges or not self._is_shared:
            return original(parameters, max_norm, norm_type)
        norm = total_norm(parameters, norm_type)
        self._judge(norm)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(map(is_sharded, gradients)):
            clip_parts(gradients, max_norm, norm)
        elif not self._is_skipped:
            # What accelerate's own method does for plain tensors. A replacement by other code may do more.
            if not getattr(original, "__module__", "").startswith("accelerate."):
                return original(parameters, max_norm, norm_type)
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.training_step`: judges a gradient that is this rank's own before it is sent."""
        loss = original(*args, **kwargs)
        if self._judges and not self._is_shared and self._trainer.accelerator.sync_gradients:
            self._judge(total_norm(self._trainer.model.parameters()))
        return loss

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        if self._judges and not self._is_judged:
            self._judge(total_norm(self._trainer.model.parameters()))  # transformers 4 may not have clipped.
        if not self._is_skipped:
            self._skipped.num_in_a_row = 0
        self._is_judged = self._is_skipped = False
        self._losses.clear()
        self._end_place()

    def on_evaluate(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._end_place()

    def _end_place(self) -> None:
        """What follows is neither a forward nor a backward pass."""
        self._place, self._is_evaluation = "", False

    def _judge(self, gradient_norm: torch.Tensor) -> None:
        """Raises if the norm is not finite, or drops the gradients of the step."""
        self._is_judged = True
        norm = float(gradient_norm)
        # The sum of squares of finite gradients may overflow. Clipping by it makes them zero, as without this package.
        # That of sharded ones, in 64 bits, does not.
        is_sum_alone = math.isinf(norm) and not has_shards(self._trainer.model)
        if math.isfinite(norm) or (is_sum_alone and not not_finite_parameters(self._trainer.model)):
            return
        fact = self._fact(norm)
        if self._on_nan == "raise":
            raise NonFiniteGradientError(
                f"{fact}.",
                hint="Look at these samples and the learning rate; on_nan='skip' leaves such steps out.",
            )
        warning, self._is_skipped = self._skipped.skip(fact), True
        # The optimizer skips parameters without a gradient, and keeps their state.
        for group in self._trainer.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._rank == 0:
            logger.warning("%s", warning)

    def _fact(self, norm: float) -> str:
        mine = not_finite_losses(self._losses)
        losses = {self._rank: mine}
        if self._is_shared:  # All ranks are here.
            losses = dict(enumerate(json.loads(text) for text in self._manager.gather_texts(json.dumps(mine))))
        parameters = () if any(losses.values()) else not_finite_parameters(self._trainer.model)
        return describe(self._step, norm, losses, parameters)

    def _explain(self, error: BaseException) -> None:
        args = self._trainer.args
        explain(
            error,
            rank=self._rank,
            device=args.device,
            place=self._place or f"step {self._step}, outside forward and backward passes",
            hint=advice(args, args.device, is_evaluation=self._is_evaluation),
        )


class BatchCount:
    """Ends a training in which a rank has run out of batches and another has not: the others would wait for it.

    Each rank publishes how many batches of the epoch it has got, which is a message and no meeting. Only a rank that
    has none left reads the others', and waits until they have none either.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        steps: What chooses the samples; where it follows one order of samples on all ranks, nothing can differ.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager, steps: StepFeed) -> None:
        self._trainer = trainer
        self._manager = manager
        self._steps = steps
        self._iterator: Any = None
        self._epoch = 0
        self._num_batches = 0
        self._has_ended = False

    def begin(self) -> None:
        """Deletes what an earlier training has published. Called before the ranks first meet in this one."""
        if self._manager.identity.world_size > 1:
            self._publish()

    def batch_samples(self, original: Callable[..., Any], epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.get_batch_samples`."""
        # Ranks that step by themselves do not wait for each other.
        if not self._manager.config.is_synchronous or self._manager.identity.world_size == 1:
            return original(epoch_iterator, *args, **kwargs)
        if self._steps.has_one_order:
            return original(epoch_iterator, *args, **kwargs)
        if epoch_iterator is not self._iterator:
            self._iterator, self._has_ended = epoch_iterator, False
            self._epoch, self._num_batches = self._epoch + 1, 0
        return original(self._counted(epoch_iterator), *args, **kwargs)

    def _counted(self, epoch_iterator: Any) -> Iterator[Any]:
        # Noted before the loop asks for more: counting tokens may be the first collective in which a rank is missing.
        for batch in epoch_iterator:
            self._num_batches += 1
            self._publish()
            yield batch
        if not self._has_ended:
            self._has_ended = True
            self._publish()
            self._wait_for_others()

    def _publish(self) -> None:
        facts = json.dumps([self._epoch, self._num_batches, self._has_ended])
        self._manager.publish(f"batches/{self._manager.identity.rank}", facts)

    def _wait_for_others(self) -> None:
        """Returns when every rank has had as many batches in this epoch."""
        for rank in set(range(self._manager.identity.world_size)) - {self._manager.identity.rank}:
            self._manager.wait(
                functools.partial(self._has_ended_epoch, rank),
                f"rank {rank} to have no more batches either",
                timeout_s=self._manager.config.timeout_s,
                hint="Let all ranks read the same data, or raise timeout_s where it only takes long.",
            )

    def _has_ended_epoch(self, rank: int) -> bool | None:
        """True once the rank has no more batches in this epoch, as this one; None before.

        Raises:
            DivergenceError: It has had more of them, or fewer.
        """
        epoch, num_batches, has_ended = json.loads(self._manager.read(f"batches/{rank}") or "[0, 0, false]")
        if epoch == self._epoch and (num_batches > self._num_batches or has_ended):
            self._compare(rank, num_batches)
        return epoch > self._epoch or (epoch == self._epoch and has_ended) or None

    def _compare(self, other: int, num_batches: int) -> None:
        mine = self._manager.identity.rank
        if num_batches == self._num_batches:
            return
        less, more = (mine, other) if num_batches > self._num_batches else (other, mine)
        raise DivergenceError(
            f"rank {less} has no more batches in step {self._trainer.state.global_step + 1}, rank {more} has: rank "
            f"{mine} got {self._num_batches} in this epoch, rank {other} {num_batches} or more.",
            hint="Let the data not depend on the rank: every rank reads the whole stream, and keeps its share.",
        )
