"""Gives a Trainer this rank's share of every optimizer step, by overriding methods of that Trainer object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from unsloth_multigpu.deal.deal import Step, StepShape, check_enough_samples, equation
from unsloth_multigpu.deal.one_process import as_one_process, batches_of_one_process
from unsloth_multigpu.deal.sampler import StepLoader, own_samplers, step_loader
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import drawn_from, kept_random_state
from unsloth_multigpu.group.replicas import STREAM
from unsloth_multigpu.library import is_library
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.seam import steered
from unsloth_multigpu.step.loss import (
    AUTO,
    GATHERED,
    WHOLE,
    find_reduction,
    gathering,
    gathering_losses,
    has_own_step,
    name_of,
    whole_ways,
)
from unsloth_multigpu.step.passes import StepPasses
from unsloth_multigpu.step.proof import StepProof
from unsloth_multigpu.step.snapshot import KeptObjects
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

logger = get_logger(__name__)


class StepFeed(Part):
    """Turns the Trainer's data loader into one that yields an optimizer step per item, with all its micro-batches.

    Attributes:
        num_accumulated: Micro-batches of a step in one process.
        batch_size: Samples of a micro-batch in one process, from the arguments or the data loader.
        loader: Yields steps. None before the training, and if the trainer's own batches are used.
        inexact, ways_out: Why the training is not exactly that of one process, and what to do; "" if it is.
        is_placed_later: The model is moved to its device, or sharded, after the loader is made. The decision on how
            samples are dealt then waits until the training begins.
        plans_one_process: Plan the steps in a single process as well.
    """

    place = "feed"
    # Evaluation stores the current `gather` of accelerate in `gather_function`.
    keeps = ("args.gradient_accumulation_steps", "args.average_tokens_across_devices", "gather_function")

    def __init__(self, trainer: TrainerLike, manager: DDPManager, beat: HeartbeatPage) -> None:
        super().__init__(trainer, manager)
        self.passes = passes = StepPasses(trainer, manager, beat)
        self.balancer, self.metrics, self.num_accumulated = passes.balancer, passes.metrics, passes.num_accumulated
        self.proof = StepProof(trainer, manager, self, beat)
        self.loader: StepLoader | None = None
        self.inexact = self.ways_out = ""
        self.batch_size = int(trainer._train_batch_size)
        self.is_placed_later = self.plans_one_process = False
        self._is_begun = self._has_loop = False
        # All ranks had the same order of samples in the latest comparison.
        self._had_one_order = False
        # Decisions that wait for the model.
        self._decide: Callable[[], None] | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Counts tokens over all ranks while it is open, and lets ranks share samples if that is asked for."""
        # Otherwise each rank would divide by its own tokens.
        self._trainer.args.average_tokens_across_devices = not self.passes.is_alone
        with gathering(gathering_losses(self._trainer), False), ExitStack() as stack:
            if self._manager.config.sequence_parallel > 1:
                from unsloth_multigpu.step.sequence import SharedSequence

                self.passes.sequence = SharedSequence(self._trainer.model, self._manager.sequence_group)
                stack.enter_context(self.passes.sequence.around())
            yield

    def overrides(self) -> dict[str, Override]:
        return {
            "get_train_dataloader": self._train_dataloader,
            "get_batch_samples": self._batch_samples,
            "training_step": self._training_step,
            "compute_loss": self.passes.loss,
            "backward": self.passes.backward,
            "get_total_train_batch_size": self._total_train_batch_size,
            "call_event": self._call_event,
        }

    def is_needed(self, seam: str) -> bool:
        # A single process needs no weights, and a script's own step may compute its loss without `compute_loss`.
        is_own = has_own_step(self._trainer)
        return seam not in ("compute_loss", "backward") or (self._is_shared and not is_own)

    def on_epoch_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        is_first, self._is_begun = not self._is_begun, True
        self.proof.is_epoch_begin = True
        # accelerate does not set the epoch of a stream when the Trainer resumes in it. The loop sets later epochs.
        if is_first and self.loader is not None and not self.has_one_order:
            self.loader.set_epoch(int((state.epoch or 0) + 1e-6))

    # Questions of other parts.

    @property
    def is_dealt(self) -> bool:
        """True if this part deals the samples of a step, in place of the script's own micro-batches."""
        return self._is_shared and self.loader is not None

    @property
    def has_one_order(self) -> bool:
        """True if all ranks follow rank 0's order of samples, so that all have equally many."""
        return self.loader is not None and not self.loader.is_stream

    def facts(self) -> dict[str, str]:
        """Returns facts that must be equal on all ranks: the plan, and a digest of the rows of a stream."""
        stream: Any = self.loader.dataset if self.loader is not None and self.loader.is_stream else None
        rows = {} if stream is None else {STREAM: stream.digest}
        return {"plan": str(self.balancer.balance), **rows}

    @property
    def _is_shared(self) -> bool:
        """False in a single process without a plan: it keeps the script's own micro-batches."""
        config = self._manager.config
        asks_for_plan = config.balance == "tokens" or config.max_tokens_per_micro_batch is not None
        return self._manager.identity.world_size > 1 or asks_for_plan or self.plans_one_process

    # Callbacks: the loop gets one item per optimizer step, with an accumulation of 1, which callbacks must not see.

    def _call_event(
        self, original: Override, event: str, arguments: ArgumentsLike, state: StateLike, *args: Any, **kwargs: Any
    ) -> Any:
        """Overrides `CallbackHandler.call_event`: callbacks see the accumulation and the loader of one process.

        Raises SetupError if a callback has changed `gradient_accumulation_steps`.
        """
        handler, asked = self._trainer.callback_handler, self.num_accumulated
        if event == "on_train_begin" and self.loader is not None:
            self._has_loop = True  # Later requests for a loader come from callbacks.
            if isinstance(handler.train_dataloader, StepLoader):  # The script has asked for another one before.
                self.loader = handler.train_dataloader
            handler.train_dataloader = self.loader.one_process
        if event == "on_step_end":
            state.epoch = self.metrics.epoch_of(state.epoch)
        before, arguments.gradient_accumulation_steps = arguments.gradient_accumulation_steps, asked
        try:
            result = original(event, arguments, state, *args, **kwargs)
            now = arguments.gradient_accumulation_steps
        finally:
            arguments.gradient_accumulation_steps = before
        if now != asked:
            self._refuse_accumulation(now, f"a callback in {event}")
        return result

    def _refuse_accumulation(self, now: int, who: str) -> None:
        raise SetupError(
            f"gradient_accumulation_steps was set from {self.num_accumulated} to {now} by {who}, while the steps of "
            "this training are dealt already.",
            hint="Call train() once for each value, with resume_from_checkpoint, or use global_batch='scale'.",
        )

    # The loader.

    def _total_train_batch_size(self, original: Callable[..., int], *args: Any) -> int:
        """Overrides `Trainer.get_total_train_batch_size`, which the Trainer logs when the training starts."""
        return self.batch_size * self.num_accumulated

    def _train_dataloader(self, original: Callable[[], Any]) -> Any:
        """Overrides `Trainer.get_train_dataloader`: converts its loader into one that yields optimizer steps."""
        trainer = self._trainer
        if self._has_loop:  # A callback gets the batches of one process.
            is_alone = self._manager.identity.world_size == 1
            with self.passes.accumulation_of_script(), nullcontext() if is_alone else batches_of_one_process(trainer):
                return original()
        raw: list[Any] = []

        def keep_raw(_original: Any, loader: Any, *_: Any, **__: Any) -> Any:
            raw.append(loader)
            return loader

        # Length-grouped samplers read the accumulation, which must be that of one process.
        with self.passes.accumulation_of_script(), steered(trainer.accelerator, "prepare_data_loader", keep_raw):
            returned = original()
        is_seedable = bool(raw)
        if not raw and type(returned) is DataLoader:  # The script did not call accelerate, which is not needed here.
            raw = [returned]
        if len(raw) != 1:
            raise SetupError(
                f"{type(trainer).__name__}.get_train_dataloader() prepared {len(raw)} data loaders; expected one.",
                hint="Return one DataLoader over all rows (torch.utils.data.ConcatDataset), as it is or by "
                "accelerator.prepare, or use global_batch='scale', where each rank takes the script's batch.",
            )
        with self.passes.accumulation_of_script():
            self.loader = self._step_loader(raw[0], is_seedable=is_seedable)
        # From now on the loop gets one item per optimizer step.
        trainer.args.gradient_accumulation_steps = 1
        return self.loader

    def _step_loader(self, raw: DataLoader[Any], *, is_seedable: bool) -> StepLoader:
        trainer, identity = self._trainer, self._manager.identity
        num_sharing = self._manager.config.sequence_parallel
        shape = StepShape(
            rank=identity.rank // num_sharing,
            world_size=identity.world_size // num_sharing,
            num_accumulated=self.num_accumulated,
            regroup=False,
            seed=trainer.args.seed,
            # Differs between ranks like the seed of the training's generators, see `Progress.on_train_begin`.
            rank_seed=trainer.args.seed + identity.rank // num_sharing,
            is_lockstep=self.passes.is_lockstep,
            num_sharing=num_sharing,
        )
        one_process = functools.partial(as_one_process, trainer, is_seedable=is_seedable)
        steps = step_loader(
            raw, shape, one_process, self._manager.broadcast_batches, self._compare_order, self.balancer.plan
        )
        self._decide = functools.partial(self._deal, steps, raw)
        if not self.is_placed_later:
            self.decide()
        return steps

    def _compare_order(
        self, order: list[list[int]], state: dict[str, Any] | None, source: Iterable[Sequence[int]]
    ) -> None:
        """Warns if a script's own sampler starts to give the ranks different orders. Collective.

        Such a sampler reads values that each rank has recorded from its own samples. A sampler whose orders differ
        from the start draws random numbers, which is no reason for a warning.
        """
        manager = self._manager
        state = manager.broadcast_json(state)
        is_same = True
        if manager.identity.rank:
            with kept_random_state():
                is_same = [[int(i) for i in batch] for batch in drawn_from(state, source)[0]] == order
        is_same = all(manager.gather_json(is_same))
        had_one_order, self._had_one_order = self._had_one_order, is_same
        if had_one_order and not is_same:
            assert self.loader is not None
            names = ", ".join(own_samplers(self.loader.one_process))
            what = f"{names} now gives ranks different orders of samples: it reads what each rank has recorded"
            ways = "Let it read what all ranks have, such as self.state.log_history, or gather what a loss records."
            self.tell(what, f"{what} of its own samples.", "Rank 0's order is used.", ways)

    def decide(self) -> None:
        """Makes the decisions that wait for the model. Collective."""
        decide, self._decide = self._decide, None
        if decide is not None:
            decide()

    def _deal(self, steps: StepLoader, loader: Any) -> None:
        """Decides how `steps` deals the samples of `loader`, the Trainer's. Collective."""
        trainer, passes, shape = self._trainer, self.passes, steps.steps.shape
        if getattr(loader.batch_sampler, "batch_size", None) == trainer.args.per_device_train_batch_size:
            # SetFit's trainer changes the argument after the Trainer has read it.
            self.batch_size = trainer.args.per_device_train_batch_size
        passes.reduction = find_reduction(trainer, self._manager.config.loss_reduction)
        # The ranks must decide alike.
        self._manager.check_same({"loss reduction": str(passes.reduction)})
        passes.is_whole = self._keeps_whole()
        regroup = passes.reduction.is_token_normalized and shape.world_size > 1
        # Ranks that step independently compare only their own rows.
        is_gathered = passes.reduction.kind == GATHERED and not passes.is_alone
        in_each = is_gathered and not passes.is_whole and shape.world_size > 1
        steps.steps.shape = shape = replace(shape, regroup=regroup, whole=passes.is_whole, in_each=in_each)
        sizes = [self.batch_size] * self.num_accumulated
        check_enough_samples(sum(sizes), shape.world_size, shape.num_sharing)
        if passes.sequence is not None:
            passes.sequence.check_loss(trainer, passes.reduction)
        dealt = ""
        if self._is_shared:
            reduction = passes.reduction
            # Reading and collating rows must not change random numbers or counters of the script.
            with kept_random_state(), KeptObjects(loader.dataset, loader.collate_fn):
                dealt = self.balancer.prepare(
                    loader,
                    is_token_sum=reduction.is_token_normalized,
                    rows_are_independent=reduction.rows_are_independent,
                    is_lockstep=shape.is_lockstep,
                )
        how = equation(sizes, shape.in_order(sizes))
        if self.num_accumulated > 1:
            self._tell_of_micro_batches()
        whole = ", whole micro-batches" if passes.is_whole and self.batch_size > 1 else ""
        gathered = ", each compared with the rows of all ranks" if in_each else ""
        if in_each and sizes[0] % shape.world_size and shape.rank == 0:
            logger.warning(
                "one rank computes a micro-batch of %d rows, which %d ranks cannot share equally: let "
                "per_device_train_batch_size, or gradient_accumulation_steps, be a multiple of %d",
                *(sizes[0], shape.world_size, shape.world_size),
            )
        together = f", each on {shape.num_sharing} ranks" if shape.num_sharing > 1 else ""
        logger.info("samples per step: %s%s%s%s%s", how, together, whole, gathered, dealt)
        self.metrics.begin(loader, self.num_accumulated)

    def _keeps_whole(self) -> bool:
        """True if the script's micro-batches are not split, which is exact for every loss.

        Raises SetupError if they would have to be, and the options do not allow that.
        """
        world_size, config = self._manager.identity.world_size, self._manager.config
        if world_size == 1 or self.passes.reduction.kind not in (AUTO, WHOLE, GATHERED):
            return False
        if self.num_accumulated >= world_size or self.batch_size == 1:
            return True
        if self.passes.reduction.kind == GATHERED:
            return False
        name, ways = name_of(self._trainer), whole_ways(world_size)
        if self.passes.reduction.kind == WHOLE:
            raise SetupError(
                f"loss_reduction='whole' keeps micro-batches whole, but a step has {self.num_accumulated} for "
                f"{world_size} ranks.",
                hint=ways,
            )
        if config.check_first_step == "off" and config.is_synchronous:
            raise SetupError(
                f"It is not known how {name} is averaged, and check_first_step='off' leaves it unmeasured.",
                hint="Set loss_reduction to 'row_mean', 'token_mean' or 'token_sum'. " + ways,
            )
        return False

    def _tell_of_micro_batches(self) -> None:
        """Warns that `on_substep_end` is not called, because a rank does not compute every micro-batch of a step."""
        for callback in self._trainer.callback_handler.callbacks:
            if not is_library(type(callback).on_substep_end.__module__):
                what = f"{type(callback).__name__}.on_substep_end is not called: a step is one item of the loop"
                ways = "Use on_step_end or on_pre_optimizer_step, or gradient_accumulation_steps=1."
                self.tell(what, f"{what}, with all its micro-batches.", "", ways)

    def tell(self, cause: str, what: str, effect: str, ways: str) -> None:
        """Warns that the training is not exactly that of one process; raises SetupError if `inexact="raise"`."""
        self.inexact, self.ways_out = cause, ways
        if self._manager.config.inexact == "raise":
            raise SetupError(what, hint=ways)
        if self._manager.identity.rank == 0:
            logger.warning("%s", " ".join(filter(None, (what, effect, ways))))

    # The steps.

    def _batch_samples(self, original: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, Any]:
        """Overrides `Trainer.get_batch_samples`: returns one step, and its number of tokens over all ranks."""
        if self.loader is not None and (now := self._trainer.args.gradient_accumulation_steps) != 1:
            self._refuse_accumulation(now, "the script")
        self.passes.count = original
        step = next(epoch_iterator, None)
        if step is None:
            return [], None
        if step.left_over is not None:
            step.left_over.num_items = self.passes.counted(step.left_over)
        return [step], self.passes.counted(step)

    def _training_step(self, original: Any, model: nn.Module, step: Step, num_items: Any = None) -> torch.Tensor:
        """Overrides `Trainer.training_step`: computes all micro-batches; the last backward synchronizes gradients."""
        known = self.passes.reduction
        self.proof.before(model, step)
        if self.passes.reduction != known:
            self.passes.weight_parts(step)
        return self.passes.train(original, model, step, num_items)
