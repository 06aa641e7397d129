"""Checks each step of one training: is its gradient finite, does every rank have a batch, is there enough memory?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import DivergenceError, NonFiniteGradientError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import has_shards, is_sharded, part_of, whole_of
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.train.lead import Lead, Moment
from unsloth_multigpu.words import listed

logger = get_logger(__name__)

# A run that skips more steps in a row than this is no longer training.
MAX_SKIPPED_IN_A_ROW = 10
_EVALUATED = "a batch of the evaluation"
# Losses or gradients that a message names.
_MAX_NAMED = 3


class StepCheck(Part):
    """Checks in every step that the gradient norm is finite, and explains out-of-memory errors.

    If gradients are synchronized before the optimizer steps, all ranks have the same gradient and decide alike without
    communication. Otherwise each rank checks its own gradient before it is sent. With a gradient scaler (fp16) nothing
    is checked, since the scaler skips such steps.

    Cost: reading the gradient norm, which clipping computes anyway, waits for the device once per step. Hugging Face's
    loop has just waited for the loss.
    """

    place = "check"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, steps: StepFeed, lead: Lead) -> None:
        super().__init__(trainer, manager)
        self._steps = steps
        self._lead = lead
        self._is_shared = manager.config.strategy.has_one_gradient or manager.identity.world_size == 1
        self._num_skipped = self._num_in_a_row = 0
        self._losses: list[Any] = []
        self._is_judged = self._is_skipped = False
        self._place = ""  # "" outside forward and backward passes.

    @contextmanager
    def around(self) -> Iterator[None]:
        """Adds an explanation to an out-of-memory error."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            self._explain_memory(error)
            raise

    def overrides(self) -> dict[str, Override]:
        found: dict[str, Override] = {"compute_loss": self._compute_loss, "clip_grad_norm_": self._clip}
        if not self._is_shared:
            found["training_step"] = self._training_step
        # Ranks that step independently do not wait for each other.
        if self._manager.config.is_synchronous and self._manager.identity.world_size > 1:
            found["get_batch_samples"] = self._batch_samples
        return found

    def is_needed(self, seam: str) -> bool:
        # A script's own training_step may not call compute_loss. The step feed checks whether that is right.
        return seam != "compute_loss" and (seam != "clip_grad_norm_" or bool(self._trainer.args.max_grad_norm))

    def _batch_samples(self, original: Callable[..., Any], epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.get_batch_samples`: if each rank loads its own samples, all must have equally many."""
        batches = epoch_iterator if self._steps.has_one_order else self._followed(epoch_iterator)
        return original(batches, *args, **kwargs)

    def _followed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches, each after asking if rank 0 has one, too: the loop uses a batch in collectives.

        Raises:
            DivergenceError: Only one of them has a batch.
        """
        rank = self._manager.identity.rank
        while True:
            batch = next(batches, None)
            has_batch = batch is not None
            if has_batch != bool(self._lead.follow(Moment.BATCH, int(has_batch), self._step - 1)):
                less, more = (0, rank) if has_batch else (rank, 0)
                raise DivergenceError(
                    f"rank {less} has no more batches in step {self._step}, but rank {more} has.",
                    hint="The data must not depend on the rank: every rank reads the whole stream and keeps its share.",
                )
            if not has_batch:
                return
            yield batch

    @property
    def _judges(self) -> bool:
        return self._manager.config.on_nan != "off" and self._trainer.accelerator.scaler is None

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1

    def _compute_loss(self, original: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kw: Any) -> Any:
        """Overrides `Trainer.compute_loss`: records the loss of each micro-batch of the step."""
        size = _size_of(inputs)
        place = f"micro-batch {len(self._losses)}" if model.training else _EVALUATED
        self._place = f"{place} of step {self._step}" + (f" ({size})" if size else "")
        result = original(model, inputs, *args, **kw)
        loss = result[0] if isinstance(result, tuple) else result
        if model.training and loss.requires_grad:
            self._losses.append(loss.detach())
        return result

    def _clip(self, original: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """Overrides `Accelerator.clip_grad_norm_`: checks the norm before gradients are clipped by it.

        Clipping by a NaN norm would make every gradient NaN, and hide the parameter that it came from.
        """
        parameters = list(parameters)
        if not self._judges or not self._is_shared:
            return original(parameters, max_norm, norm_type)
        norm = total_norm(parameters, norm_type)
        self._judge(norm)
        if not self._is_skipped:
            parts = [p for p in parameters if is_sharded(p.grad)]
            # The code below does the same as accelerate's own method. A replacement by other code may do more.
            if not parts and not getattr(original, "__module__", "").startswith("accelerate."):
                return original(parameters, max_norm, norm_type)
            for same in (parts, [p for p in parameters if not is_sharded(p.grad)]):
                nn.utils.clip_grads_with_norm_(same, max_norm, norm)
        return norm

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.training_step`: checks this rank's own gradient before it is sent."""
        loss = original(*args, **kwargs)
        if self._judges and self._trainer.accelerator.sync_gradients:
            self._judge(total_norm(self._trainer.model.parameters()))
        return loss

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        if self._judges and not self._is_judged:
            self._judge(total_norm(self._trainer.model.parameters()))  # transformers 4 may not have clipped.
        if not self._is_skipped:
            self._num_in_a_row = 0
        self._is_judged = self._is_skipped = False
        self._losses.clear()
        self._place = ""

    def on_evaluate(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._place = ""

    def _judge(self, gradient_norm: torch.Tensor) -> None:
        """Raises if the norm is not finite, or drops the gradients of the step."""
        self._is_judged = True
        norm = float(gradient_norm)
        if math.isfinite(norm):
            return
        fact = self._not_finite(norm)
        if self._manager.config.on_nan == "raise":
            raise NonFiniteGradientError(
                f"{fact}.", hint="Look at these samples and the learning rate; on_nan='skip' leaves such steps out."
            )
        if self._num_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteGradientError(
                f"{fact}. The {MAX_SKIPPED_IN_A_ROW} steps before it were left out as well.",
                hint="Lower the learning rate, or resume from an earlier checkpoint: the weights give no finite loss.",
            )
        self._num_skipped += 1
        self._num_in_a_row += 1
        self._is_skipped = True
        # The optimizer skips parameters without a gradient, and keeps their state.
        for group in self._trainer.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        if self._manager.identity.rank == 0:
            logger.warning("%s: left out on all ranks (%d so far)", fact, self._num_skipped)

    def _not_finite(self, norm: float) -> str:
        """Describes the current step, whose gradient norm is not finite, in one line. Collective if it is shared."""
        trainer, rank = self._trainer, self._manager.identity.rank
        values = [float(loss) for loss in self._losses]
        mine = [(i, str(value)) for i, value in enumerate(values) if not math.isfinite(value)]
        ranks = dict(enumerate(self._manager.gather_json(mine))) if self._is_shared else {rank: mine}
        fact = f"step {trainer.state.global_step + 1}: gradient norm is {norm}"
        found = [f"loss of rank {r}, micro-batch {i}, was {value}" for r, its in ranks.items() for i, value in its]
        if found:
            return f"{fact}; {listed(found, _MAX_NAMED, '; ')}"
        fact += "; all losses were finite" if len(ranks) > 1 else f"; the losses of rank {rank} were finite"
        # Of a gradient that is divided among the ranks, this rank's part.
        gradients = [(name, part_of(p.grad)) for name, p in trainer.model.named_parameters() if p.grad is not None]
        names = [name for name, gradient in gradients if not _values_of(gradient).isfinite().all()]
        if names:
            return f"{fact}, but not the gradient of {listed(names, _MAX_NAMED)}"
        return fact if has_shards(trainer.model) else f"{fact}, and its sum of squares overflows"

    def _explain_memory(self, error: BaseException) -> None:
        """Adds to an out-of-memory error its place, what memory holds, and what to set. Other errors stay unchanged."""
        from unsloth_multigpu.step.out_of_memory import advice, explain, filled, is_out_of_memory

        if not is_out_of_memory(error):
            return
        args, model, manager = self._trainer.args, self._trainer.model, self._manager
        place = self._place or f"step {self._step}, outside forward and backward passes"
        parameters = list(model.parameters())
        states = getattr(self._trainer.optimizer, "state", {}).values()
        held = filled(
            args.device,
            weights=parameters,
            gradients=[p.grad for p in parameters if p.grad is not None],
            optimizer=[v for state in states for v in state.values() if isinstance(v, torch.Tensor)],
        )
        shards = has_shards(model) if manager.identity.world_size > 1 else None
        is_evaluation, offloads = self._place.startswith(_EVALUATED), manager.config.shard_offload
        explain(
            error,
            rank=manager.identity.rank,
            device=args.device,
            place=f"{place} ({held})" if held else place,
            hint=advice(args, is_evaluation=is_evaluation, shards=shards, offloads=offloads),
        )


def _size_of(inputs: Any) -> str:
    """Describes the largest two-dimensional tensor of a micro-batch: "8 rows x 512 tokens"; "" if there is none."""
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    shapes = [v.shape for v in values if isinstance(v, torch.Tensor) and v.dim() == 2]
    if not shapes:
        return ""
    rows, tokens = max(shapes, key=lambda shape: shape.numel())
    return f"{rows} rows x {tokens} tokens"


def total_norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
    """Returns the norm of all gradients together, on their device. Collective if they are sharded."""
    gradients = [_values_of(p.grad) for p in parameters if p.grad is not None]
    kinds = ([g for g in gradients if not is_sharded(g)], [g for g in gradients if is_sharded(g)])
    norms = [whole_of(nn.utils.get_total_norm(same, norm_type)) for same in kinds if same]
    return nn.utils.get_total_norm(norms, norm_type)


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the values of a gradient, which may be sparse."""
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
