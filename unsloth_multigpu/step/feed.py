"""Feeds a Trainer this rank's share of every optimizer step, by replacing methods of the one Trainer object.

Long because these methods share the state of one step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.replicas import STREAM
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.seam import instance_attribute, steered, unsteered
from unsloth_multigpu.step.balance import Balancer
from unsloth_multigpu.step.deal import check_divisible, equation
from unsloth_multigpu.step.inputs import free_rows, on_device, take
from unsloth_multigpu.step.loss import (
    AUTO,
    SUM,
    TOKEN_SUM,
    WHOLE,
    Inexact,
    LossReduction,
    find_reduction,
    hidden_at_first,
    whole_ways,
    without_effect,
)
from unsloth_multigpu.step.metrics import Metrics
from unsloth_multigpu.step.one_process import as_one_process, batches_of_one_process, seen_alone
from unsloth_multigpu.step.own_code import is_scripts_own, name_of
from unsloth_multigpu.step.proof import StepProof
from unsloth_multigpu.step.sampler import StepLoader, step_loader
from unsloth_multigpu.step.step import MicroBatch, Step, StepShape, without_labels
from unsloth_multigpu.step.stream import StepStream
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

logger = get_logger(__name__)


class StepFeed(Part):
    """Chooses what the Trainer's loop sees: one loader item per optimizer step, with all its micro-batches.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        beat: This rank's page.

    Attributes:
        current: The micro-batch that is being computed.
        inexact: Why the training is not exactly that of one process; None where it is.
        is_lockstep: Ranks meet in every micro-batch.
        is_placed_later: The model comes to its device, and is sharded, only when the loader is there. Then it is
            decided when the training begins how samples are dealt.
        is_whole: The script's micro-batches are dealt whole.
        loader: Of whole steps; None before the training, and where the trainer's own batches are used.
        plans_one_process: Steps are planned in one process as well.
    """

    place = "feed"
    # An evaluation keeps a reference to what it finds as accelerate's `gather`.
    keeps = ("args.gradient_accumulation_steps", "args.average_tokens_across_devices", "gather_function")

    def __init__(self, trainer: TrainerLike, manager: DDPManager, beat: HeartbeatPage) -> None:
        self.trainer = trainer
        self.manager = manager
        self._beat = beat
        self.num_accumulated = int(trainer.args.gradient_accumulation_steps)
        self.num_samples = 0
        self.num_micro_batches = 0
        self._reduction = LossReduction(TOKEN_SUM, SUM)
        self._piece_factor = 1.0
        self._in_loss = self._must_count = False
        # Where the factor of the micro-batch has been applied: to its loss, or as its backward pass began.
        self._is_weighed = False
        # The trainer's own `compute_loss` and `get_batch_samples`.
        self._loss: Any = None
        self._count: Callable[..., Any] | None = None
        self.is_whole = False
        self._is_seedable = True
        self.loader: StepLoader | None = None
        # Ranks that step by themselves: each divides by its own samples, and no rank waits for a count.
        self._is_alone = not manager.config.is_synchronous
        self.balancer = Balancer(trainer, manager)
        self.metrics = Metrics(trainer, manager)
        self.proof = StepProof(trainer, manager, self, beat)
        self.current: MicroBatch | None = None
        self._is_begun = self._has_loop = False
        self.inexact: Inexact | None = None
        self.is_lockstep = self.is_placed_later = self.plans_one_process = False
        # Makes the decisions that wait for the model.
        self._decide: Callable[[], None] | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Tokens are counted over all ranks, and what a micro-batch costs is measured."""
        self._loss = self.trainer.compute_loss
        # A mean over each rank's own tokens is not what one process computes.
        self.trainer.args.average_tokens_across_devices = not self._is_alone
        with self.balancer.stopwatch.on_model():
            yield

    def overrides(self) -> dict[str, Override]:
        return {
            "get_train_dataloader": self._train_dataloader,
            "get_batch_samples": self._batch_samples,
            "training_step": self._training_step,
            "compute_loss": self._compute_loss,
            "backward": self._backward,
            "get_total_train_batch_size": self._total_train_batch_size,
            **dict.fromkeys(("gather", "gather_for_metrics", "reduce"), self._unless_in_loss),
        }

    def is_needed(self, seam: str) -> bool:
        # One process that is only guarded weighs nothing, and a script's own step may compute its loss by itself.
        is_own = is_scripts_own(self.trainer, "training_step")
        return seam not in ("compute_loss", "backward") or (self._is_shared and not is_own)

    def on_epoch_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        is_first, self._is_begun = not self._is_begun, True
        self.proof.begin_epoch()
        # A stream is to shuffle for its epoch also where the Trainer resumes in it: accelerate forgets it there. Later
        # epochs are told by the loop, which counts passes of a stream, too.
        if is_first and self.loader is not None and not self.has_one_order:
            self.loader.set_epoch(int((state.epoch or 0) + 1e-6))

    @property
    def _is_shared(self) -> bool:
        """False in a single process that is only guarded: it keeps the script's own micro-batches."""
        config = self.manager.config
        asks_for_plan = config.balance == "tokens" or config.max_tokens_per_micro_batch is not None
        return self.manager.identity.world_size > 1 or asks_for_plan or self.plans_one_process

    @property
    def reduction(self) -> LossReduction:
        """How the loss is reduced, as far as it is known."""
        return self._reduction

    @property
    def is_dealt(self) -> bool:
        """The samples of a step are dealt here, by others than the script's own micro-batches."""
        return self._is_shared and self.loader is not None

    def facts(self) -> dict[str, str]:
        """What ranks that share steps have in common: their plan, and the rows of a stream, which each reads."""
        stream = None if self.loader is None else self.loader.dataset
        rows = {STREAM: stream.digest()} if isinstance(stream, StepStream) else {}
        return {"plan": self.balancer.state(), **rows}

    def accumulation_of_script(self) -> AbstractContextManager[None]:
        """Lets code of the script, and files, have its `gradient_accumulation_steps`, which is 1 for the loop."""
        return instance_attribute(self.trainer.args, "gradient_accumulation_steps", self.num_accumulated)

    def _total_train_batch_size(self, original: Callable[..., int], *args: Any) -> int:
        """`Trainer.get_total_train_batch_size`: the number that the start of the training prints."""
        return int(self.trainer._train_batch_size) * self.num_accumulated

    def begin(self, loader: Any) -> None:
        """The loop has its loader: who asks for one from here on is not the loop.

        Args:
            loader: The loop's own, where the script has asked for another one before.
        """
        self._has_loop = True
        if isinstance(loader, StepLoader):
            self.loader = loader

    def _train_dataloader(self, original: Callable[[], Any]) -> Any:
        """`Trainer.get_train_dataloader`: the loader it builds, turned into one of whole steps for the loop."""
        trainer = self.trainer
        if self._has_loop:
            return self._loader_beside(original)
        # Length-grouped samplers read it, and must see what one process has.
        trainer.args.gradient_accumulation_steps = self.num_accumulated
        raw: list[Any] = []

        def keep_raw(_original: Any, loader: Any, *_: Any, **__: Any) -> Any:
            raw.append(loader)
            return loader

        with steered(trainer.accelerator, "prepare_data_loader", keep_raw):
            returned = original()
        if not raw and type(returned) is DataLoader:  # One process needs nothing of what accelerate does to it.
            raw, self._is_seedable = [returned], False
        if len(raw) != 1:
            raise SetupError(
                f"{type(trainer).__name__}.get_train_dataloader() prepared {len(raw)} data loaders; expected one.",
                hint="Return one DataLoader over all rows (torch.utils.data.ConcatDataset), as it is or by "
                "accelerator.prepare, or use global_batch='scale', where each rank takes the script's batch.",
            )
        shape = StepShape(
            rank=self.manager.identity.rank,
            world_size=self.manager.identity.world_size,
            num_accumulated=self.num_accumulated,
            regroup=False,
            planner=self.balancer,
            seed=trainer.args.seed,
            # As the generators of the training itself, see the callback of `DDPTrainer`.
            rank_seed=trainer.args.seed + self.manager.identity.rank,
            is_lockstep=self.is_lockstep,
        )
        self.loader = steps = step_loader(raw[0], shape, self._as_one_process, self.manager.broadcast_batches)
        self._decide = lambda: steps.deal(self._dealt(raw[0], steps, shape))
        if not self.is_placed_later:
            self.decide()
        # From here on the loop sees one item per optimizer step.
        trainer.args.gradient_accumulation_steps = 1
        return steps

    def _loader_beside(self, original: Callable[[], Any]) -> Any:
        """One process's batches, for a callback: neither the loop's order nor another rank has to do with them."""
        args, before = self.trainer.args, self.trainer.args.gradient_accumulation_steps
        args.gradient_accumulation_steps = self.num_accumulated
        is_alone = self.manager.identity.world_size == 1
        try:
            with nullcontext() if is_alone else batches_of_one_process(self.trainer):
                return original()
        finally:
            args.gradient_accumulation_steps = before

    def decide(self) -> None:
        """Makes the decisions that have waited for the model. Collective."""
        decide, self._decide = self._decide, None
        if decide is not None:
            decide()

    def _dealt(self, loader: Any, steps: StepLoader, shape: StepShape) -> StepShape:
        """Decides how samples are dealt. Collective.

        Args:
            loader: As the Trainer built it.
            steps: What is made of it.
            shape: Without these decisions.
        """
        trainer, config = self.trainer, self.manager.config
        reduction = find_reduction(trainer, self._loss, config.loss_reduction)
        # Ranks with different decisions would deal differently.
        self._reduction = LossReduction.from_text(self.manager.gather_texts(reduction.to_text())[0])
        is_whole = self.is_whole = self._keeps_whole()
        regroup = self._reduction.is_token_normalised and shape.world_size > 1
        shape = replace(shape, regroup=regroup, whole=is_whole)
        sizes = [1 if loader.batch_sampler is None else trainer._train_batch_size] * self.num_accumulated
        check_divisible(sum(sizes), shape.world_size)
        self.balancer.is_lockstep = shape.is_lockstep
        dealt = self.balancer.prepare(loader, self._reduction) if self._is_shared else ""
        how = equation(sizes, shape.world_size, regroup=shape.regroup, whole=shape.whole)
        whole = ", whole micro-batches" if is_whole and trainer._train_batch_size > 1 else ""
        logger.info("samples per step: %s%s%s", how, whole, dealt)
        self.metrics.begin(loader, self.num_accumulated)
        return shape

    def _keeps_whole(self) -> bool:
        """True where the script's micro-batches are dealt whole, which is exact for any function of a micro-batch.

        Raises:
            SetupError: `loss_reduction="whole"` and there are too few; or nothing is known of the loss, and it is not
                to be measured; or the first step cannot show it, and `inexact="raise"`.
        """
        world_size, reduction = self.manager.identity.world_size, self._reduction
        if world_size == 1 or reduction.kind not in (AUTO, WHOLE):
            return False
        if self.num_accumulated >= world_size or self.trainer._train_batch_size == 1:
            return True
        name, ways = name_of(self.trainer, self._loss), whole_ways(world_size)
        if reduction.kind == WHOLE:
            raise SetupError(
                f"loss_reduction='whole' keeps micro-batches whole, and a step has {self.num_accumulated} for "
                f"{world_size} ranks.",
                hint=ways,
            )
        if self.manager.config.check_first_step == "off" and not self._is_alone:
            raise SetupError(
                f"It is not known how {name} is averaged, and check_first_step='off' leaves it unmeasured.",
                hint="Set loss_reduction to 'row_mean', 'token_mean' or 'token_sum'. " + ways,
            )
        if hidden := hidden_at_first(self.trainer, self._loss):
            self.tell(hidden, f"The loss of a micro-batch cannot be shared exactly. {name}: {hidden}.", "", ways)
        return False

    def tell(self, cause: str, what: str, so: str, ways: str) -> None:
        """Warns that this is not exactly the training of one process, or refuses it.

        Raises:
            SetupError: `inexact="raise"`.
        """
        self.inexact = Inexact(cause, ways)
        if self.manager.config.inexact == "raise":
            raise SetupError(what, hint=ways)
        if self.manager.identity.rank == 0:  # It warns for all.
            logger.warning("%s", " ".join(filter(None, (what, so, ways))))

    def use(self, reduction: LossReduction) -> None:
        """Weighs parts of micro-batches in this way from here on."""
        self._reduction = reduction

    def shares_micro_batches(self, sizes: Sequence[int]) -> bool:
        """True where ranks compute parts of one micro-batch.

        Args:
            sizes: Rows of each micro-batch of a step of one process; empty = of a full step.
        """
        world_size = self.manager.identity.world_size
        return world_size > 1 and not self.is_whole and (len(sizes) or self.num_accumulated) % world_size != 0

    def count_as_given(self, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """What the script's own `get_batch_samples` makes of micro-batches: them, and the number of their tokens."""
        count = unsteered(self.trainer.get_batch_samples)
        return count(iter(inputs), len(inputs), self.trainer.args.device)  # type: ignore[no-any-return]

    def _as_one_process(self, loader: Any) -> Any:
        return as_one_process(self.trainer, loader, is_seedable=self._is_seedable)

    def _batch_samples(self, original: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, Any]:
        """`Trainer.get_batch_samples`: one step, with the tokens of all its micro-batches counted over all ranks."""
        if self.loader is not None and self.trainer.args.gradient_accumulation_steps != 1:
            raise SetupError(
                f"gradient_accumulation_steps was set to {self.trainer.args.gradient_accumulation_steps} while the "
                f"training ran; its steps are dealt with {self.num_accumulated}.",
                hint="Call train() once for each value, with resume_from_checkpoint, or use global_batch='scale'.",
            )
        self._count = original
        step = next(epoch_iterator, None)
        if step is None:
            return [], None
        if step.left_over is not None:
            step.left_over_items = self.counted(step.left_over)
        return [step], self.counted(step)

    def counted(self, step: Step) -> Any:
        """Brings a step to the device; its tokens over all ranks, None where a loss takes no count. Collective."""
        assert self._count is not None
        device = self.trainer.args.device
        for micro_batch in step.micro_batches:
            # Tokens are counted over ranks by a collective, which takes tensors of the group's device only.
            micro_batch.inputs = on_device(self.trainer, micro_batch.inputs)
        # The samples of a filler already count in the step.
        inputs = [without_labels(m.inputs) if m.piece.is_filler else m.inputs for m in step.micro_batches]
        batches, num_items = self._count(iter(inputs), len(inputs), device)
        take(self.trainer, step, inputs, batches)
        if self.balancer.varies_rows:
            free_rows([m.inputs for m in step.micro_batches])
        if self._reduction.is_token_normalised and num_items is None:
            raise SetupError(
                f"{type(self.trainer).__name__} counted no tokens in a step, but its loss is to be divided by them.",
                hint="Give the samples labels, or use global_batch='scale'.",
            )
        if self._is_alone and num_items is not None:
            # A rank whose only micro-batch is a filler has no token of its own.
            num_items = max(num_items, 1) if isinstance(num_items, int) else num_items.clamp(min=1)
        self._weigh_parts(step)
        return num_items

    def _weigh_parts(self, step: Step) -> None:
        if self._reduction.is_token_normalised:
            return
        is_exchanged = self.balancer.exchanges and len(set(step.sizes)) == 1
        if not is_exchanged and not self.shares_micro_batches(range(step.num_references)):
            return
        if self._reduction.is_counted:
            ranks = self.weigh(step, self._reduction)
            if is_exchanged and step.num_references > 1:
                self._check_all_count(step, sum(map(sum, ranks)))
            return
        for micro_batch in step.micro_batches:
            micro_batch.share, micro_batch.is_unweighted = micro_batch.piece.share, False

    def _check_all_count(self, step: Step, num_labels: float) -> None:
        """Says that rows without a label were exchanged: micro-batches of one process count by what they have left."""
        if num_labels >= len(step.samples) or self.inexact is not None:
            return
        what = "Rows without a label (-100) are exchanged between micro-batches, whose means they leave unequal."
        self.tell("rows without a label are exchanged", what, "", "Set balance='off', or leave these rows out.")

    def weigh(self, step: Step, reduction: LossReduction) -> list[list[float]]:
        """A mean over tokens, or a weighted one: a part of a micro-batch counts by these, not by its rows. Collective.

        Returns:
            What the parts of each micro-batch count on each rank.
        """
        mine = [0.0] * step.num_references
        for micro_batch in step.micro_batches:
            micro_batch.weight = 0.0
            if not micro_batch.piece.is_filler:
                micro_batch.weight = reduction.count(micro_batch.inputs)
            mine[micro_batch.piece.reference] += micro_batch.weight
        if self._is_alone:
            for micro_batch in step.micro_batches:
                micro_batch.share = micro_batch.weight
            return [mine]
        ranks = self.manager.gather_floats(mine)
        totals = [sum(counts) for counts in zip(*ranks, strict=True)]
        for micro_batch in step.micro_batches:
            total = totals[micro_batch.piece.reference]
            # Rows that were exchanged are of all micro-batches together.
            num_together = step.num_references if micro_batch.piece.work else 1
            micro_batch.share = num_together * micro_batch.weight / (total or 1.0)
            micro_batch.is_unweighted = total == 0
        return ranks

    def _training_step(self, original: Any, model: nn.Module, step: Step, num_items: Any = None) -> torch.Tensor:
        """`Trainer.training_step`: forward and backward of all micro-batches; gradients meet in the last backward."""
        known = self._reduction
        self.proof.before(model, step)
        if self._reduction != known:
            self._weigh_parts(step)
        loss = self._computed(original, model, step, num_items)
        self._multiply_gradients(model)
        self.metrics.end_step()
        return loss

    def computed(self, model: nn.Module, step: Step, num_items: Any, *, is_synced: bool) -> Iterator[int]:
        """The gradient of a step alone, by the script's own methods: nothing is counted, noted or timed.

        Yields the place in the step of the micro-batch of one process before each of ours.

        Args:
            model: As `training_step` gets it.
            step: Counted.
            num_items: What `counted` has returned.
            is_synced: Gradients meet in the last backward.
        """
        training_step = unsteered(self.trainer.training_step)
        loss = functools.partial(self._compute_loss, unsteered(self.trainer.compute_loss))
        with instance_attribute(self.trainer, "compute_loss", loss):
            for i, micro_batch in enumerate(self._each(step, num_items)):
                self.mark(i)
                yield micro_batch.piece.reference
                is_last = is_synced and i == len(step.micro_batches) - 1
                with nullcontext() if is_last else self.trainer.accelerator.no_sync(model):
                    self._call(training_step, model, num_items)
        self._multiply_gradients(model)

    def _computed(
        self, original: Any, model: nn.Module, step: Step, num_items: Any, *, is_left_over: bool = False
    ) -> torch.Tensor:
        losses = []
        if step.left_over is not None:
            with self.trainer.accelerator.no_sync(model):
                left_over = self._computed(original, model, step.left_over, step.left_over_items, is_left_over=True)
            losses.append(left_over)
        for i, micro_batch in enumerate(self._each(step, num_items)):
            is_last = i == len(step.micro_batches) - 1
            self.mark(i)
            self.balancer.stopwatch.start()
            noted = self.metrics.micro_batch(micro_batch, is_left_over=is_left_over)
            with noted, nullcontext() if is_last else self.trainer.accelerator.no_sync(model):
                loss = self._call(original, model, num_items)
            # A mean over nothing is NaN; it counts nothing.
            losses.append(loss * self._gradient_factor if self._piece_factor else torch.zeros_like(loss))
            self.metrics.note_loss(losses[-1], micro_batch)
            self.balancer.note(micro_batch.piece)
            self.num_micro_batches += 1
            self.num_samples += 0 if micro_batch.piece.is_filler else len(micro_batch.piece.positions)
        self.balancer.end_step()
        step.plan_following()
        return torch.stack(losses).sum()

    def mark(self, micro_batch: int) -> None:
        """Tells the watchdog which micro-batch is about to be computed."""
        self._beat.mark(micro_batch=micro_batch)

    def _each(self, step: Step, num_items: Any) -> Iterator[MicroBatch]:
        """The micro-batches of a step, each with its factor and what the Trainer and the script divide by."""
        trainer = self.trainer
        self._must_count = num_items is not None and self._reduction.is_token_normalised
        # The Trainer divides by it, and losses that are means of micro-batches, and auxiliary losses.
        trainer.current_gradient_accumulation_steps = step.num_references
        if is_scripts_own(trainer, "training_step"):
            # A script's own step divides by the accumulation that it reads here.
            trainer.args.gradient_accumulation_steps = self.num_accumulated
        try:
            for micro_batch in step.micro_batches:
                self.current, self._piece_factor = micro_batch, self._factor(micro_batch, step)
                yield micro_batch
        finally:
            self.current, self._must_count = None, False
            trainer.args.gradient_accumulation_steps = 1

    def _call(self, training_step: Any, model: nn.Module, num_items: Any) -> torch.Tensor:
        """One call of `training_step`, for the current micro-batch; returns its weighed loss."""
        assert self.current is not None
        self._is_weighed = False
        loss: torch.Tensor = training_step(model, self.current.inputs, num_items)
        return loss if self._is_weighed or not self._piece_factor else loss * self._piece_factor

    def _multiply_gradients(self, model: nn.Module) -> None:
        if self._gradient_factor != 1.0:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], self._gradient_factor)

    def _compute_loss(self, original: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.compute_loss`: weighted by the part of the step that the micro-batch is."""
        if self._must_count and model.training and (args[1:2] or [kwargs.get("num_items_in_batch")])[0] is None:
            raise SetupError(
                f"{type(self.trainer).__name__}.training_step() computes a loss without the step's token count.",
                hint="Hand it on: compute_loss(..., num_items_in_batch=num_items_in_batch); or global_batch='scale'.",
            )
        self._in_loss = model.training
        try:
            with self.accumulation_of_script(), self._multiplied_by_nothing(), seen_alone(self.trainer, self._loss):
                result = original(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        if not model.training or self.current is None:
            return result
        loss, *others = result if isinstance(result, tuple) else (result,)
        weighed, self._is_weighed = self._weighed(loss), True
        return (weighed, *others) if isinstance(result, tuple) else weighed

    def _backward(self, original: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.backward`: weighs what a script's own `training_step` has computed without `compute_loss`."""
        if self.current is None or self._is_weighed:
            return original(loss, *args, **kwargs)
        return original(self._weighed(loss), *args, **kwargs)

    def _weighed(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss of the current micro-batch, by the part of the step that it is."""
        if self._piece_factor == 1.0:
            return loss
        if not self._piece_factor and self.is_lockstep and not bool(torch.isfinite(loss)):
            raise SetupError(
                "A micro-batch has no label, and its mean loss is not a number: sharded ranks cannot leave it out.",
                hint="Let the loss be a sum divided by num_items_in_batch, or leave rows without a label out.",
            )
        return loss * self._piece_factor if self._piece_factor else without_effect(loss)

    def _unless_in_loss(self, exchange: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.gather` and its like, which TRL's losses call for metrics (and KTO's for its estimate of KL).

        Inside a loss a micro-batch is by itself, as in one process: ranks differ in its rows and in how many there are.
        """
        if not self._in_loss and not self.proof.is_alone:
            with self.manager.waits.counted():
                return exchange(tensor, *args, **kwargs)
        return tensor

    @property
    def has_one_order(self) -> bool:
        """True where all ranks follow rank 0's order of samples: none runs out of them before another."""
        return self.loader is not None and not isinstance(self.loader.dataset, StepStream)

    def _factor(self, micro_batch: MicroBatch, step: Step) -> float:
        """What a micro-batch's loss counts, so that DDP's average over ranks is the one-process gradient.

        For a rank that steps by itself: so that its own gradient is the mean over its own part.
        """
        factor = 1.0 if self._is_alone else self.manager.identity.world_size / self._gradient_factor
        if self._reduction.is_token_normalised:
            return 0.0 if micro_batch.piece.is_filler else factor
        if self._reduction.mean_over != SUM or micro_batch.piece.is_filler:  # Sums of parts are the sum of the whole.
            factor *= micro_batch.share
        if self._is_alone:
            # As if this rank's part were the whole step, whose shares add up to its number of references.
            mine = sum(m.share for m in step.micro_batches)
            factor *= step.num_references / mine if mine else 0.0
        return factor

    @property
    def _gradient_factor(self) -> float:
        """Multiplies a step's gradient after the backward passes, in place of the losses before them.

        With a scaler, an fp16 gradient has to overflow where that of one process does, or other steps are skipped.
        """
        is_scaled = self.trainer.accelerator.scaler is not None and not self._is_alone
        return float(self.manager.identity.world_size) if is_scaled else 1.0

    def _multiplied_by_nothing(self) -> AbstractContextManager[None]:
        """A loss is that of one process: `_factor` multiplies by the ranks, whatever parts of it a script would."""
        if self.manager.identity.world_size == 1:
            return nullcontext()
        return instance_attribute(self.trainer.args, "average_tokens_across_devices", False)
