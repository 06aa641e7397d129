"""Compares the gradient of a step with that of one process, before the step is trained.

The step is computed twice: as one process computes it, and as the ranks share it. Both passes start from the same
weights, buffers, random state and script state, and restore them. The gradient depends on loss, hooks and collator.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from unsloth_multigpu.deal.deal import MicroBatch, Step
from unsloth_multigpu.deal.one_process import counted_as_one_process, nothing_gathered, without_other_ranks
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import draw_seed, read_random_state, seed_all
from unsloth_multigpu.group.shards import has_shards, is_entered_below
from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.seam import instance_attribute, unsteered
from unsloth_multigpu.step.comparison import (
    MOST_ROUNDING,
    Comparison,
    Difference,
    difference,
    difference_of_means,
    last_bits_changed,
    names_of,
    rounding_bound,
    sketch,
)
from unsloth_multigpu.step.loss import (
    AUTO,
    TOKEN_MEAN,
    TOKEN_SUM,
    WHOLE,
    LossReduction,
    name_of,
    own_code,
    shared_means,
    whole_ways,
)
from unsloth_multigpu.step.passes import on_device
from unsloth_multigpu.step.snapshot import ERRORS, KeptObjects, LonePass, WithoutDropout, kept_training_state
from unsloth_multigpu.step.step_rows import NotPossibleError, StepRows
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

if TYPE_CHECKING:
    from unsloth_multigpu.step.feed import StepFeed

logger = get_logger(__name__)

# Errors of torch's DDP about an unexpected backward pass.
_OF_DDP = re.compile(r"mark a variable ready only once|to have finished reduction")
# Limit for `check_first_step="auto"`, in seconds, estimated from the first micro-batch.
_MOST_S = 60.0
# If both passes of a comparison take less time than this, they are run again to be timed: the first compiles kernels.
_TIMED_AGAIN_S = 20.0
# If the loss reduction was found by measurement, each of the first steps is compared.
_EARLY_STEPS = 16
# After a reported difference, a later one is reported if it is larger by this factor.
_WORSE = 10


class StepProof:
    """Compares steps of a training with the same steps in one process.

    Attributes:
        first: The first comparison of this training; None before it.
        last: The latest comparison.
        is_epoch_begin: The next step is the first of an epoch.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager, feed: StepFeed, beat: HeartbeatPage) -> None:
        self._trainer = trainer
        self._beat = beat
        beat.note(first_step="")
        self._manager = manager
        self._feed = feed
        self._num_steps = 0
        self._is_over = False
        # Time spent in comparisons, on the slowest rank.
        self._seconds = 0.0
        # The largest difference that was reported.
        self._told_off = 0.0
        # Loss reductions that also fit all comparisons. Values: the largest difference of weights that was tried.
        self._rivals: dict[LossReduction, float] = {}
        self._lone = LonePass(trainer, beat)
        self.first: Comparison | None = None
        self.last: Comparison | None = None
        self.is_epoch_begin = False

    def values(self) -> dict[str, Any]:
        """Returns the first comparison as JSON values; empty if there is none yet."""
        return {} if self.first is None else self.first.values()

    def before(self, model: nn.Module, step: Step) -> None:
        """Compares the step that is about to be trained, if a comparison is due. Collective in that case."""
        self._num_steps += 1
        is_epoch_begin, self.is_epoch_begin = self.is_epoch_begin, False
        how = self._manager.config.check_first_step
        if how == "off" or not self._feed.is_dealt or self._is_over:
            return
        if step.left_over is not None or not step.sizes:
            return  # This step ends one pass of a stream and begins the next. The next step is compared.
        is_first = self.first is None
        is_power = not self._num_steps & (self._num_steps - 1)
        # A wrong loss reduction may give the right gradient in one step by chance.
        may_be_early = self._num_steps <= _EARLY_STEPS and not self._told_off
        is_early = may_be_early and self._is_unknown and self._seconds < _MOST_S
        may_change = self._feed.passes.reduction.kind == AUTO or self._own_code
        is_due = is_first or how == "every" or ((is_power or is_epoch_begin or is_early) and may_change)
        apart = {} if is_due else self._apart(step)
        if not (is_due or apart):
            return
        self.last = found = self._compared(model, step, is_first=is_first)
        if math.isnan(found.difference.off) and not self._is_over and self._num_steps < _EARLY_STEPS:
            return  # Not finite in either pass, as while a gradient scaler looks for its scale.
        # What the compared part of a long step does not tell apart is not tried again at once.
        if found.num_compared < found.num_references:
            self._rivals |= {each: by for each, by in apart.items() if each in self._rivals}
        if is_first:
            self.first = found
        if is_first or not (found.is_exact or found.unproven):
            self._beat.note(first_step=found.in_short())
        self._say(found, is_first=is_first)

    @functools.cached_property
    def _own_code(self) -> list[str]:
        return own_code(self._trainer, self._feed.loader)

    def _compared(self, model: nn.Module, step: Step, *, is_first: bool) -> Comparison:
        trainer, num_references = self._trainer, len(step.sizes)
        with self._manager.waits.counted():
            self._manager.gather_json(None)  # Waits for late ranks, so that this time is not measured.
        number, num_ranks = int(trainer.state.global_step) + 1, self._manager.identity.world_size
        base = Comparison(number, num_ranks, num_references, num_references)
        begin_s = time.monotonic()
        try:
            found = self._measured(base, model, step, is_first=is_first)
        except NotPossibleError as error:
            self._is_over = True
            return replace(base, unproven=str(error))
        finally:
            self._lone.end()
        self._seconds += max(self._manager.gather_json(time.monotonic() - begin_s))
        if math.isnan(found.difference.off):
            return replace(found, unproven="its gradient is not finite, in one process as well")
        return found

    def _measured(self, base: Comparison, model: nn.Module, step: Step, *, is_first: bool) -> Comparison:
        """Runs both passes; raises NotPossibleError on all ranks if they cannot be run."""
        loader, gather = self._feed.loader, self._manager.gather_json
        if not self._manager.config.is_synchronous:
            raise NotPossibleError("with these options, ranks do not synchronize in every step")
        assert loader is not None
        batches = loader.one_process
        with KeptObjects(batches.collate_fn, batches.dataset) as kept, _without_optimizer():
            with self._feed.passes.accumulation_of_script():
                rows = StepRows(loader.dataset, step, self._seed, kept.restore)
            # The time of one micro-batch decides how many are compared; it is the same number on all ranks.
            each_s = max(self._tried(model, rows, 1).seconds, 1e-6) * (1 + 1 / base.num_ranks)
            num_compared = min(base.num_references, max(base.num_ranks, int(_MOST_S / each_s)))
            rows = rows.part(num_compared, loader.steps.shape)
            one = self._tried(model, rows, num_compared)
            off, dealt = self._as_dealt(model, rows, one)
            one_s, dealt_s = one.seconds, dealt.seconds
            if is_first and one_s + dealt_s < _TIMED_AGAIN_S:
                one_s = self._tried(model, rows, num_compared).seconds
                dealt_s = self._dealt_once(model, rows, one)[1].seconds
            is_random = any(gather(one.has_drawn))
            if is_random:
                again = self._again(model, rows, one, self._seed + 1)
                is_random = any(gather(not self._is_within(again)))
            if is_random and not self._is_within(off):
                why = "it draws random numbers besides dropout, so even one process would compute it differently"
                raise NotPossibleError(f"{why} twice")
            if not self._is_within(off) and off.off <= MOST_ROUNDING:
                with last_bits_changed(self._trainer.model):
                    again = self._again(model, rows, one, self._seed)
                base = replace(base, rounding=max(gather(again.off)))
        base = replace(base, num_compared=num_compared, bound=rounding_bound(self._trainer), difference=off)
        drawing = {"dropout": one.has_dropped, "the collator": rows.collator_draws, "the data set": rows.data_draws}
        drawing["the model or its loss"] = is_random
        draws = tuple(name for name, is_drawn in drawing.items() if is_drawn)
        both = one.numbers.keys() & dealt.numbers.keys()
        counts = [name for name in both if not math.isclose(one.numbers[name], dealt.numbers[name], rel_tol=1e-3)]
        counts = sorted({name for theirs in gather(counts) for name in theirs})
        return replace(base, one_s=one_s, dealt_s=dealt_s, draws=draws, counts=tuple(counts))

    def _is_within(self, found: Difference) -> bool:
        return found.is_within(rounding_bound(self._trainer))

    @property
    def _seed(self) -> int:
        return draw_seed(int(self._trainer.args.seed), self._num_steps)

    def _tried(self, model: nn.Module, rows: StepRows, num_references: int) -> WithoutDropout:
        """Computes the first micro-batches as one process does; raises NotPossibleError if a rank cannot. Collective.

        The seconds are those of rank 0, whose device one process would use.
        """
        why, found = "", WithoutDropout()
        try:
            rows.as_dealt()
            found = self._as_one(model, rows.part(num_references, None), self._seed)
        except NotPossibleError as error:
            why = str(error)
        except (*ERRORS, MemoryError, OSError, RuntimeError) as error:
            if is_entered_below(error):
                raise SetupError(
                    f"{name_of(self._trainer)} calls a part of the model by "
                    "itself, but a sharded model gathers its weights only when the model itself is called.",
                    hint="Call the model that the loss is given, model(**inputs), and take what is needed from its "
                    "output (output_hidden_states=True gives the states before the head); or leave shard out.",
                ) from error
            if has_shards(self._trainer.model):
                raise
            from unsloth_multigpu.step.out_of_memory import is_out_of_memory

            why = f"it cannot be computed by itself ({type(error).__name__}: {str(error)[:200]})"
            if is_out_of_memory(error):
                why = "the script's own micro-batch does not fit on one device"
        ranks = self._manager.gather_json([why, found.seconds])
        for why, _ in ranks:
            if why:
                raise NotPossibleError(why)
        found.seconds = ranks[0][1]
        return found

    def _as_one(self, model: nn.Module, rows: StepRows, seed: int) -> WithoutDropout:
        """Computes the step as one process does, without any of our overrides."""
        trainer, device = self._trainer, self._trainer.args.device
        training_step = unsteered(trainer.training_step)
        with kept_training_state(trainer) as result, self._alone():
            inputs = [on_device(trainer, batch) for batch in rows.as_one_process()]
            count = unsteered(trainer.get_batch_samples)
            batches, num_items = count(iter(inputs), len(inputs), device)
            trainer.current_gradient_accumulation_steps = len(batches)

            def compute(bare: nn.Module, i: int) -> None:
                seed_all(draw_seed(seed, i))
                random_state = read_random_state(device.type)
                training_step(bare, batches[i], num_items)
                result.has_drawn |= read_random_state(device.type) != random_state

            result.gradient, result.seconds = self._lone.gradient(model, len(batches), compute)
        return result

    def _again(self, model: nn.Module, rows: StepRows, one: WithoutDropout, seed: int) -> Difference:
        """Computes the step as one process does again, and compares its gradient with that of `one`."""
        again = self._as_one(model, rows, seed)
        return difference([one.gradient], [again.gradient], names_of(self._trainer.model))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        trainer = self._trainer
        with ExitStack() as stack:
            stack.enter_context(counted_as_one_process(trainer))
            stack.enter_context(nothing_gathered(trainer))
            if self._own_code:
                stack.enter_context(without_other_ranks())
            stack.enter_context(self._feed.passes.accumulation_of_script())
            stack.enter_context(instance_attribute(trainer.args, "average_tokens_across_devices", False))
            for name in ("compute_loss", "get_batch_samples"):
                stack.enter_context(instance_attribute(trainer, name, unsteered(getattr(trainer, name))))
            yield

    def _as_dealt(self, model: nn.Module, rows: StepRows, one: WithoutDropout) -> tuple[Difference, WithoutDropout]:
        """Computes the step on all ranks, with the first loss reduction that fits one process. Collective."""
        passes, before = self._feed.passes, self._feed.passes.reduction
        found: list[tuple[Difference, WithoutDropout, LossReduction]] = []
        reductions = self._reductions(rows, one)
        for reduction in reductions:
            passes.reduction = reduction
            found.append((*self._dealt_once(model, rows, one), reduction))
            if self._is_within(found[-1][0]):
                off, dealt, _ = found[-1]
                break
        else:
            off, dealt, nearest = min(found, key=lambda each: each[0].off)
            # A declared reduction stays. Otherwise the nearest is used.
            passes.reduction = nearest if before.kind == AUTO else before
        if before.kind == AUTO or self._manager.config.loss_reduction == TOKEN_MEAN:
            if self.first is None or passes.reduction != before:
                rivals = reductions if self.first is None else self._rivals
                self._rivals = dict.fromkeys(rivals, rounding_bound(self._trainer))
            for each_off, _, reduction in found:
                if reduction == passes.reduction or not self._is_within(each_off):
                    self._rivals.pop(reduction, None)
            if self.first is not None and not math.isnan(off.off):
                self._try_rivals(model, rows, one, reductions)
        return off, dealt

    def _try_rivals(
        self, model: nn.Module, rows: StepRows, one: WithoutDropout, reductions: Sequence[LossReduction]
    ) -> None:
        """Computes the step with each rival that weights it differently, and keeps those that fit. Collective."""
        passes, used = self._feed.passes, self._feed.passes.reduction
        for rival, apart in self._apart(rows.as_dealt()).items():
            passes.reduction = rival
            # The inputs of another step may lack what a rival counts.
            if rival in reductions and self._is_within(self._dealt_once(model, rows, one)[0]):
                self._rivals[rival] = apart
            else:
                del self._rivals[rival]
        passes.reduction = used

    def _apart(self, step: Step) -> dict[LossReduction, float]:
        """Returns the rivals whose weights differ more than twice what was tried, and by how much. Collective."""
        if not self._rivals or self._told_off:
            return {}
        apart = self._feed.passes.apart(step, list(self._rivals))
        return {each: by for each, by in zip(self._rivals, apart, strict=True) if by > 2 * self._rivals[each]}

    def _reductions(self, rows: StepRows, one: WithoutDropout) -> list[LossReduction]:
        """Returns the loss reductions to try, the current one first. The same on all ranks."""
        known, asked = self._feed.passes.reduction, self._manager.config.loss_reduction
        # After a difference was reported the reduction stays.
        if asked not in (AUTO, TOKEN_MEAN) or known.is_token_normalized or self._told_off:
            return [known]
        if not self._feed.passes.shares_micro_batches(rows.sizes):
            return [known]
        whole = rows.as_one_process()
        parts = [m.inputs for m in rows.as_dealt().micro_batches if not m.piece.is_filler]
        ranks = self._manager.gather_json(shared_means([*whole, *parts], one.class_weights, asked))
        names = [name for name in ranks[0] if all(name in others for others in ranks)]
        found = [replace(known, mean_over=name, class_weights=one.class_weights) for name in names]
        if known.kind == AUTO and self.first is None:
            return found
        return [known, *(each for each in found if each.mean_over != known.mean_over)]

    def _dealt_once(self, model: nn.Module, rows: StepRows, one: WithoutDropout) -> tuple[Difference, WithoutDropout]:
        """Computes the step once on all ranks, and compares it with `one`. The seconds are those of the slowest."""
        manager, trainer = self._manager, self._trainer
        is_exchanged = isinstance(manager.config.strategy, DDP) and manager.identity.world_size > 1
        with kept_training_state(trainer) as result:
            step = rows.as_dealt()
            num_items = self._feed.passes.counted(step)
            self._lone.zero_used()
            manager.gather_json(None)  # All ranks start at the same time.
            begin = moment(trainer.args.device)
            try:
                self._feed.passes.compare(model, step, num_items, self._seeded, is_synced=is_exchanged)
            except ERRORS as error:
                what = f"{type(error).__name__}: {str(error)[:200]}"
                raise SetupError(
                    f"A part of a micro-batch cannot be computed by itself ({what}).", hint=self._ways_out()
                ) from error
            except RuntimeError as error:
                if is_exchanged and _OF_DDP.search(str(error)):
                    raise SetupError(
                        f"One process can compute the step, but DDP cannot ({str(error)[:50]}...): it looks for "
                        "tensors in the model's output, and does not search every class of output.",
                        hint="strategy='allreduce' exchanges gradients after the backward pass, without DDP. Or let "
                        "the model return a tensor, a tuple, a dict or a dataclass.",
                    ) from error
                raise
            result.seconds = Lap(begin, moment(trainer.args.device)).seconds()
            result.gradient = sketch(trainer.model)
        ones, dealt, times = zip(*manager.gather_json([one.gradient, result.gradient, result.seconds]), strict=True)
        result.seconds = max(times)
        names = names_of(trainer.model)
        if has_shards(trainer.model):
            return difference(ones, dealt, names), result
        if not is_exchanged and manager.identity.world_size > 1:
            return difference_of_means(ones, dealt, names), result
        each = [difference([mine], [theirs], names) for mine, theirs in zip(ones, dealt, strict=True)]
        return max(each, key=lambda found: found.off), result

    @contextmanager
    def _seeded(self, micro_batch: MicroBatch, _: Step) -> Iterator[None]:
        """Lets a complete micro-batch draw the same random numbers as in one process."""
        seed_all(draw_seed(self._seed, micro_batch.piece.reference))
        yield

    def _say(self, found: Comparison, *, is_first: bool) -> None:
        if found.is_exact or (found.unproven and not self._is_unknown):
            if is_first and self._manager.identity.rank == 0:
                logger.info("%s", found)
            return
        if found.unproven:
            cause = f"it is not known how {name_of(self._trainer)} is averaged"
            effect = f"Parts of micro-batches are weighted by this: {self._feed.passes.reduction.mean_over}."
            self._feed.tell(cause, f"{found}; {cause}.", effect, self._ways_out())
            return
        off = found.difference
        worst = f", most in {off.worst}" if off.worst else ""
        norms = f"norm {off.other_norm:.6g} in place of {off.norm:.6g}{worst}"
        what = f"{found} ({norms}): this is not exactly the training of one process."
        own = f"The step has code of the script's own: {', '.join(self._own_code)}." if self._own_code else ""
        if off.off < _WORSE * self._told_off and self._manager.config.check_first_step == "auto":
            return
        self._told_off = off.off
        self._feed.tell(f"{found}", what, own, self._ways_out())

    @property
    def _is_unknown(self) -> bool:
        return self._feed.passes.reduction.kind == AUTO and self._feed.passes.shares_micro_batches(())

    def _ways_out(self) -> str:
        asked = self._manager.config.loss_reduction
        if asked not in (AUTO, WHOLE):
            return f"The script sets loss_reduction={asked!r}. Leave it out: the first step then measures it."
        if self._feed.passes.shares_micro_batches(()):
            return whole_ways(self._manager.identity.world_size)
        if self._feed.passes.reduction.kind == TOKEN_SUM:
            return "Set loss_reduction='whole'."
        return (
            "What a micro-batch leaves for the next one (a counter, a moving average, the gradient so far) is not "
            "shared by ranks: let it depend on self.state.global_step, or do it once a step, in a callback's "
            "on_pre_optimizer_step. With gradient_accumulation_steps=1 there is no difference."
        )


@contextmanager
def _without_optimizer() -> Iterator[None]:
    """Refuses optimizer steps, which the comparison could not undo. A script's own training_step may make one."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def refuse(*_: Any) -> None:
        raise NotPossibleError("an optimizer steps within the forward and backward pass of a micro-batch")

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
