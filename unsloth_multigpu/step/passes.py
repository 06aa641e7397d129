"""Runs the forward and backward passes of a step, and weights the loss of each micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unsloth_multigpu.deal.balance import Balancer
from unsloth_multigpu.deal.deal import MicroBatch, Step, without_labels
from unsloth_multigpu.deal.one_process import counted_as_one_process, nothing_gathered
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.seam import instance_attribute, unsteered
from unsloth_multigpu.step.loss import (
    GATHERED,
    ROWS,
    SUM,
    TOKEN_SUM,
    LossReduction,
    count_of,
    gathering,
    gathering_losses,
)
from unsloth_multigpu.step.metrics import Metrics
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

if TYPE_CHECKING:
    from unsloth_multigpu.step.sequence import SharedSequence

# Surrounds a micro-batch of a step.
Around = Callable[[MicroBatch, Step], AbstractContextManager[None]]


class StepPasses:
    """Computes this rank's micro-batches of a step so that the ranks' mean gradient is that of one process.

    Attributes:
        reduction: How the loss is reduced, as far as it is known.
        is_whole: Each of the script's micro-batches stays on one rank.
        is_lockstep: Ranks synchronize in every micro-batch, as sharded models do.
        current: The micro-batch that is being computed.
        sequence: Splits samples over ranks (`sequence_parallel`); None without it.
        count: The trainer's own `get_batch_samples`, which counts tokens.
        num_samples, num_micro_batches: Computed so far.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager, beat: HeartbeatPage) -> None:
        self._trainer = trainer
        self._manager = manager
        self._beat = beat
        self.num_accumulated = int(trainer.args.gradient_accumulation_steps)
        # Ranks that step independently (local SGD, DiLoCo) divide by their own samples, without a collective.
        self.is_alone = not manager.config.is_synchronous
        self.balancer = Balancer(trainer, manager)
        self.metrics = Metrics(trainer, manager)
        self.reduction = LossReduction(TOKEN_SUM, SUM)
        self.is_whole = self.is_lockstep = False
        # The script's own step has called `loss.backward()`, so the loss of the last micro-batch was not weighted.
        self._is_own_backward = False
        self.current: MicroBatch | None = None
        self.sequence: SharedSequence | None = None
        self.count: Callable[..., Any] | None = None
        self.num_samples = self.num_micro_batches = 0

    @property
    def is_repeated(self) -> bool:
        """True if the samples of this rank are counted by another rank of its group."""
        return self.sequence is not None and self.sequence.rank > 0

    def accumulation_of_script(self) -> AbstractContextManager[None]:
        """Sets `gradient_accumulation_steps`, which is 1 for the Trainer's loop, to the script's value in a context."""
        return instance_attribute(self._trainer.args, "gradient_accumulation_steps", self.num_accumulated)

    def shares_micro_batches(self, sizes: Sequence[int]) -> bool:
        """True if ranks compute parts of the same micro-batch of a step with these `sizes`; empty = a full step."""
        world_size = self._manager.identity.world_size
        return world_size > 1 and not self.is_whole and (len(sizes) or self.num_accumulated) % world_size != 0

    def counted(self, step: Step) -> Any:
        """Moves a step to the device; returns its number of tokens over all ranks, None if not counted. Collective."""
        assert self.count is not None
        trainer, device = self._trainer, self._trainer.args.device
        for micro_batch in step.micro_batches:
            # The collective that counts tokens needs tensors on the device of the process group.
            micro_batch.inputs = on_device(trainer, micro_batch.inputs)
        # The samples of a filler, and those that another rank computes as well, are counted already.
        inputs = [
            without_labels(m.inputs) if m.piece.is_filler or self.is_repeated else m.inputs for m in step.micro_batches
        ]
        batches, num_items = self.count(iter(inputs), len(inputs), device)
        take(trainer, step, inputs, batches)
        if self.balancer.varies_rows:
            mark_rows_dynamic([m.inputs for m in step.micro_batches])
        if self.reduction.is_token_normalized and num_items is None:
            raise SetupError(
                f"{type(trainer).__name__} counted no tokens in a step, but its loss is to be divided by them.",
                hint="Give the samples labels, or use global_batch='scale'.",
            )
        if self.is_alone and num_items is not None:
            # A rank whose only micro-batch is a filler has no token of its own.
            num_items = max(num_items, 1) if isinstance(num_items, int) else num_items.clamp(min=1)
        self.weight_parts(step)
        return num_items

    def weight_parts(self, step: Step) -> None:
        """Sets the weight of each part of a micro-batch, by the known loss reduction. Collective."""
        if self.reduction.is_token_normalized or not self.shares_micro_batches(step.sizes):
            return
        if self.reduction.mean_over in (ROWS, SUM):  # Rows are known from the plan, and sums need no weight.
            for micro_batch in step.micro_batches:
                micro_batch.share = micro_batch.piece.share
            return
        # For a mean over tokens, or a weighted mean, a part is weighted by its tokens or weights, not by its rows.
        weights = [0.0 if m.piece.is_filler else self.reduction.count(m.inputs) for m in step.micro_batches]
        mine = [0.0] * len(step.sizes)
        for micro_batch, weight in zip(step.micro_batches, weights, strict=True):
            mine[micro_batch.piece.reference] += weight
        ranks = [mine] if self.is_alone else self._manager.gather_json(mine)
        totals = [sum(counts) for counts in zip(*ranks, strict=True)]
        for micro_batch, weight in zip(step.micro_batches, weights, strict=True):
            micro_batch.share = weight if self.is_alone else weight / (totals[micro_batch.piece.reference] or 1.0)

    def apart(self, step: Step, others: Sequence[LossReduction]) -> list[float]:
        """Returns for each of `others` how much its weights differ, in sum over a micro-batch. Collective."""
        ways, found = (self.reduction, *others), []
        ranks = self._manager.gather_json([_counts(step, way) for way in ways])
        for way, counts in zip(ways, zip(*ranks, strict=True), strict=True):
            totals = [1.0 if way.mean_over == SUM else sum(column) or 1.0 for column in zip(*counts, strict=True)]
            found.append([n / total for row in counts for n, total in zip(row, totals, strict=True)])
        known, *rest = found
        return [sum(abs(a - b) for a, b in zip(known, each, strict=True)) / len(step.sizes) for each in rest]

    def train(self, original: Any, model: nn.Module, step: Step, num_items: Any) -> torch.Tensor:
        """Computes a step that `counted` has prepared, for the training; returns its loss times the number of ranks.

        `original` is `Trainer.training_step`. Gradients are synchronized in the last backward pass.
        """
        found = []
        if (rest := step.left_over) is not None:
            found = self._computed(original, model, rest, rest.num_items, self._noted, is_synced=False)
        losses = torch.stack(found + self._computed(original, model, step, num_items, self._noted, is_synced=True))
        self._multiply_gradients(model)
        self.balancer.end_step()
        self.metrics.end_step(losses, is_shared=self.shares_micro_batches(step.sizes))
        return losses.sum()

    def compare(self, model: nn.Module, step: Step, num_items: Any, around: Around, *, is_synced: bool) -> None:
        """Computes the gradient of a step that `counted` has prepared, by the script's methods, without metrics.

        `around` surrounds each micro-batch. With `is_synced` gradients are synchronized in the last backward pass.
        """
        loss = functools.partial(self.loss, unsteered(self._trainer.compute_loss))
        with instance_attribute(self._trainer, "compute_loss", loss):
            training_step = unsteered(self._trainer.training_step)
            self._computed(training_step, model, step, num_items, around, is_synced=is_synced)
        self._multiply_gradients(model)

    def _computed(
        self, training_step: Any, model: nn.Module, step: Step, num_items: Any, around: Around, *, is_synced: bool
    ) -> list[torch.Tensor]:
        trainer = self._trainer
        losses: list[torch.Tensor] = []
        # The divisor of the Trainer, of losses that average over micro-batches, and of auxiliary losses.
        trainer.current_gradient_accumulation_steps = len(step.sizes)
        is_cut = not self.is_alone and any(0 < m.piece.share < 1 for m in step.micro_batches)
        gathered = gathering_losses(trainer) if self.reduction.kind == GATHERED else []
        try:
            # A script's own step reads its divisor from the arguments.
            with self.accumulation_of_script(), gathering(gathered, is_cut):
                for i, micro_batch in enumerate(step.micro_batches):
                    self._beat.mark(micro_batch=i)
                    self.current, micro_batch.factor = micro_batch, self._factor(micro_batch, step)
                    is_last = is_synced and micro_batch is step.micro_batches[-1]
                    synced = nullcontext() if is_last else trainer.accelerator.no_sync(model)
                    with around(micro_batch, step), synced:
                        loss = self._call(training_step, model, micro_batch, num_items)
                    # The mean over no rows is NaN; its weight is 0.
                    losses.append(loss * self._gradient_factor if micro_batch.factor else torch.zeros_like(loss))
        finally:
            self.current = None
        return losses

    @contextmanager
    def _noted(self, micro_batch: MicroBatch, step: Step) -> Iterator[None]:
        """Surrounds a micro-batch of the training."""
        timed = self.balancer.stopwatch.timing(self._trainer.model)
        with timed, self.metrics.micro_batch(micro_batch, step, self.sequence):
            yield
        self.balancer.note(micro_batch.piece)
        self.num_micro_batches += 1
        if not (micro_batch.piece.is_filler or self.is_repeated):
            self.num_samples += len(micro_batch.piece.positions)

    def _call(self, training_step: Any, model: nn.Module, micro_batch: MicroBatch, num_items: Any) -> torch.Tensor:
        """Calls `training_step` once; returns the weighted loss."""
        micro_batch.is_weighted, self._is_own_backward = False, True
        shared = nullcontext() if self.sequence is None else instance_attribute(self.sequence, "is_on", True)
        with nullcontext() if micro_batch.factor else _without_gradient(model, self._trainer.optimizer), shared:
            loss: torch.Tensor = training_step(model, micro_batch.inputs, num_items)
        self._is_own_backward &= not micro_batch.is_weighted
        if self._is_own_backward and self.is_lockstep:
            raise SetupError(
                f"{type(self._trainer).__name__}.training_step calls backward() by itself, and the model is sharded: "
                "micro-batches that a rank computes only to keep pace with the others would count.",
                hint="Let it call self.accelerator.backward(loss).",
            )
        return loss if micro_batch.is_weighted or not micro_batch.factor else loss * micro_batch.factor

    def _multiply_gradients(self, model: nn.Module) -> None:
        factor = self._gradient_factor
        if self._is_own_backward and self.is_whole and not self.is_alone:
            factor = float(self._manager.identity.world_size)
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], factor)

    def loss(self, original: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.compute_loss`: weights the loss by the micro-batch's part of the step."""
        with ExitStack() as stack:
            stack.enter_context(self.accumulation_of_script())
            if self._manager.identity.world_size > 1:
                # The Trainer would multiply some losses by the number of ranks. `_factor` does it for all.
                stack.enter_context(instance_attribute(self._trainer.args, "average_tokens_across_devices", False))
            stack.enter_context(counted_as_one_process(self._trainer))
            if model.training:
                stack.enter_context(nothing_gathered(self._trainer))
            if self.sequence is not None and self.sequence.is_on:
                inputs = stack.enter_context(self.sequence.part_of(inputs))
            result = original(model, inputs, *args, **kwargs)
        if not model.training or self.current is None:
            return result
        loss, *others = result if isinstance(result, tuple) else (result,)
        weighted, self.current.is_weighted = self._weighted(loss, self.current.factor), True
        return (weighted, *others) if isinstance(result, tuple) else weighted

    def backward(self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Accelerator.backward`: weights a loss that a script's `training_step` computed by itself."""
        self._is_own_backward = False
        if self.current is not None and not self.current.is_weighted:
            loss = self._weighted(loss, self.current.factor)
        return original(loss, *args, **kwargs)

    def _weighted(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        if factor == 1.0:
            return loss
        if not factor and self.is_lockstep and not bool(torch.isfinite(loss)):
            raise SetupError(
                "A micro-batch has no label, so its mean loss is NaN, and sharded ranks cannot leave it out.",
                hint="Let the loss be a sum divided by num_items_in_batch, or leave rows without a label out.",
            )
        return loss * factor if factor else loss.nan_to_num() * 0.0

    def _factor(self, micro_batch: MicroBatch, step: Step) -> float:
        """Returns the factor of a micro-batch's loss with which DDP's mean over ranks is the gradient of one process.

        For a rank that steps independently, the gradient is the mean over its own samples.
        """
        factor = 1.0 if self.is_alone else self._manager.identity.world_size / self._gradient_factor
        if self.reduction.is_token_normalized:
            return 0.0 if micro_batch.piece.is_filler else factor
        if self.reduction.mean_over != SUM or micro_batch.piece.is_filler:  # Sums of parts are the sum of the whole.
            factor *= micro_batch.share
        if self.is_alone:
            # Scales this rank's shares as if they were the complete step.
            mine = sum(m.share for m in step.micro_batches)
            factor *= len(step.sizes) / mine if mine else 0.0
        return factor

    @property
    def _gradient_factor(self) -> float:
        """Returns a factor for the gradient after the backward passes, which then is left out of the losses.

        An fp16 gradient has to overflow exactly where that of one process does. Otherwise other steps are skipped.
        """
        return float(self._manager.identity.world_size) if self._is_half and not self.is_alone else 1.0

    @functools.cached_property
    def _is_half(self) -> bool:
        is_scaled = self._trainer.accelerator.scaler is not None
        return is_scaled or any(p.dtype == torch.float16 for p in self._trainer.model.parameters())


def _counts(step: Step, reduction: LossReduction) -> list[float]:
    """Returns what a loss reduction counts in this rank's parts of each micro-batch; 0 if the inputs lack it."""
    found = [0.0] * len(step.sizes)
    for m in step.micro_batches:
        if not m.piece.is_filler:
            known = {ROWS: m.piece.share, SUM: 1.0}.get(reduction.mean_over)
            found[m.piece.reference] += known or count_of(m.inputs, reduction.mean_over, reduction.class_weights) or 0.0
    return found


@contextmanager
def _without_gradient(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Makes backward passes add zeros: a mean over no labels is NaN, and a script's own step may not weight it."""
    groups = [] if optimizer is None else optimizer.param_groups  # A loss may have parameters beside the model.
    with ExitStack() as stack:
        for parameter in {*model.parameters(), *(p for group in groups for p in group["params"])}:
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(torch.zeros_like).remove)
        yield


def on_device(trainer: TrainerLike, inputs: Any) -> Any:
    """Moves a collated micro-batch to the Trainer's device, as accelerate's loader does.

    `Trainer._prepare_inputs` stays with `training_step`, since a script's own version must be called once.
    """
    from accelerate.utils import send_to_device

    return send_to_device(inputs, trainer.args.device)


def take(trainer: TrainerLike, step: Step, given: Sequence[Any], batches: Sequence[Any]) -> None:
    """Takes the batches that `get_batch_samples` has returned for those `given`: a script may have changed them."""
    if len(batches) != len(given):
        raise SetupError(
            f"{type(trainer).__name__}.get_batch_samples() returned {len(batches)} batches, and was given {len(given)}:"
            " the weight of each in the step is not known.",
            hint="Return one for each that it takes from epoch_iterator, or use global_batch='scale'.",
        )
    for micro_batch, before, batch in zip(step.micro_batches, given, batches, strict=True):
        labelled = micro_batch.inputs
        if batch is before:
            continue
        micro_batch.inputs = batch
        if before is not labelled and isinstance(batch, Mapping) and isinstance(before, Mapping):
            # A filler keeps its labels, and its share is zero: a mean over no labels would be NaN.
            kept = {n: labelled[n] for n, v in before.items() if v is not labelled[n] and batch.get(n) is v}
            micro_batch.inputs = {**batch, **kept}


def mark_rows_dynamic(inputs: Sequence[Any]) -> None:
    """Marks the number of rows as dynamic for torch.compile, where a Trainer has marked it as static.

    Unsloth does that when it counts a step's tokens. Compiled functions that take a mask or tokens would then be
    compiled again for each number of rows. A weak dynamic mark has priority over a static one.
    """
    for batch in inputs:
        for value in batch.values() if isinstance(batch, Mapping) else ():
            if 0 in getattr(value, "_dynamo_static_indices", ()):
                torch._dynamo.maybe_mark_dynamic(value, 0)
