"""Computes a step of the training twice before it is trained, as one process does and as it is dealt, and compares.

Nothing has to be known about a loss, a hook or a collator: each is judged by what it does to the gradient. Both passes
begin with the same weights, buffers, random numbers and state of the script, and leave them as they were.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.random_state import draw_seed, read_random_state
from unsloth_multigpu.group.shards import has_shards, is_entered_below, tried_pass
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.seam import instance_attribute, unsteered
from unsloth_multigpu.step.bound import rounding_bound
from unsloth_multigpu.step.comparison import Comparison, is_within
from unsloth_multigpu.step.given import Given, NotPossibleError
from unsloth_multigpu.step.inputs import on_device
from unsloth_multigpu.step.loss import AUTO, TOKEN_MEAN, TOKEN_SUM, LossReduction, name_of, whole_ways
from unsloth_multigpu.step.measure import Lap, moment
from unsloth_multigpu.step.memory import is_out_of_memory
from unsloth_multigpu.step.one_process import counted_as_one_process, without_other_ranks
from unsloth_multigpu.step.own_code import own_code
from unsloth_multigpu.step.sketch import Difference, difference, mean_of, names_of, sketch
from unsloth_multigpu.step.snapshot import kept_data_state, kept_training_state
from unsloth_multigpu.step.step import Step
from unsloth_multigpu.step.still import Still
from unsloth_multigpu.step.weighing import NEXT, ROWS, SUM, TOKENS, candidates, obstacle
from unsloth_multigpu.strategy import DDP
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

if TYPE_CHECKING:
    from unsloth_multigpu.step.feed import StepFeed

logger = get_logger(__name__)

# What computing a micro-batch may raise that is the script's own, or a library's.
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
# What `check_first_step="auto"` may take, in seconds, by the time of the first micro-batch.
_MOST_S = 60.0
# Steps at the begin of which each is compared, where parts of a loss count by a weighing that was measured.
_EARLY_STEPS = 16
# Passes that are quicker than this together are made once more, for their time: kernels compile in the first one.
_TIMED_AGAIN_S = 20.0


@dataclass(frozen=True)
class _Trial:
    """Micro-batches as one process computes them.

    Args:
        why: It cannot be done, on one of the ranks at least; "" = it was.
        gradient: Its sketch.
        still: What was seen of the losses.
        seconds: On rank 0, whose device one process would have.
    """

    why: str
    gradient: list[float]
    still: Still
    seconds: float


class StepProof:
    """Compares steps of one training with those of one process.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        feed: Computes what is dealt.
        beat: This rank's page.

    Attributes:
        first: The first comparison of this training; None before it.
        last: The newest one.
        is_alone: A pass as one process is under way: no other rank is in it.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager, feed: StepFeed, beat: HeartbeatPage) -> None:
        self._trainer = trainer
        self._beat = beat
        beat.tell_first_step("")
        self._manager = manager
        self._feed = feed
        self._num_steps = 0
        self._is_epoch_begin = False
        self._is_over = False
        # That comparisons have taken, on the slowest rank.
        self._seconds = 0.0
        self.first: Comparison | None = None
        self.last: Comparison | None = None
        self.is_alone = False

    def values(self) -> dict[str, Any]:
        """The first comparison as JSON values; empty before it, and without one."""
        return {} if self.first is None else self.first.values()

    def begin_epoch(self) -> None:
        """The next step is the first one of an epoch."""
        self._is_epoch_begin = True

    def before(self, model: nn.Module, step: Step) -> None:
        """Compares the step that is about to be trained, where its turn has come. Collective then.

        Raises:
            SetupError: It is another one, and `inexact="raise"`.
        """
        self._num_steps += 1
        is_epoch_begin, self._is_epoch_begin = self._is_epoch_begin, False
        how = self._manager.config.check_first_step
        if how == "off" or not self._feed.is_dealt or self._is_over:
            return
        is_first = self.first is None
        is_power = not self._num_steps & (self._num_steps - 1)
        # A loss of parts may fit in one step by chance.
        is_early = self._num_steps <= _EARLY_STEPS and self._is_unknown and self._seconds < _MOST_S
        is_due = is_first or how == "every" or ((is_power or is_epoch_begin or is_early) and self._may_change)
        if not is_due:
            return
        if step.left_over is not None or not step.sizes:
            return  # Of two passes of a stream, each divided by itself: the next step is compared.
        self.last = found = self._compared(model, step, is_first=is_first)
        if found.difference is not None and math.isnan(found.difference.off) and self._num_steps < _EARLY_STEPS:
            return  # Not finite in either way, as while a scaler looks for its scale: the next step may be.
        if is_first:
            self.first = found
        if is_first or not (found.is_exact or found.unproven):
            self._beat.tell_first_step(found.in_short())
        self._say(found, is_first=is_first)

    @functools.cached_property
    def _may_change(self) -> bool:
        """True where a later step may be reduced in another way than the first: it is code of the script's own."""
        return not self._feed.reduction.is_declared or bool(self._own_code)

    @functools.cached_property
    def _own_code(self) -> list[str]:
        """What the script wrote of the step, in words."""
        assert self._feed.loader is not None
        return own_code(self._trainer, self._feed.loader)

    def _compared(self, model: nn.Module, step: Step, *, is_first: bool) -> Comparison:
        trainer, feed = self._trainer, self._feed
        with self._manager.waits.counted():
            self._manager.gather_floats([0.0])  # Who comes late to the step is waited for here.
        num_references = len(step.sizes)
        base = Comparison(
            int(trainer.state.global_step) + 1, self._manager.identity.world_size, num_references, num_references
        )
        if why := self._obstacle():
            self._is_over = True
            return replace(base, unproven=why)
        loader = feed.loader
        assert loader is not None
        begun = time.monotonic()
        with kept_data_state(loader.one_process), self._without_optimizer():
            with feed.accumulation_of_script():
                given = Given(loader.dataset, step, self._seed)
            # How long a micro-batch takes decides how many are compared, on all ranks alike.
            trial = self._tried(model, given, 1)
            if not trial.why:
                num_compared = _affordable(num_references, base.num_ranks, trial.seconds)
                given = given.part(num_compared, loader.shape)
                trial = self._tried(model, given, num_compared)
            if trial.why:
                self._is_over = True
                return replace(base, unproven=trial.why)
            one, still, one_s = trial.gradient, trial.still, trial.seconds
            dealt, dealt_s = self._as_dealt(model, given, one, still)
            if is_first and one_s + max(row[0] for row in self._manager.gather_floats([dealt_s])) < _TIMED_AGAIN_S:
                one_s = self._tried(model, given, num_compared).seconds
                dealt_s = self._dealt_once(model, given, one)[1]
            has_drawn = any(row[0] for row in self._manager.gather_int64([still.has_drawn]))
            is_random = has_drawn and self._draws(model, given, one)
            draws = self._drawn(given, still, is_random=is_random)
        times = self._manager.gather_floats([dealt_s, time.monotonic() - begun])
        self._seconds += max(row[1] for row in times)
        found = replace(
            base,
            num_compared=num_compared,
            bound=rounding_bound(trainer),
            one_s=one_s,
            dealt_s=max(row[0] for row in times),
            difference=dealt,
            draws=draws,
        )
        logger.debug("step %d was compared in %.2f s", base.step, time.monotonic() - begun)
        if is_random and not self._is_within(dealt):
            self._is_over = self._is_auto
            why = "it draws random numbers beyond dropout, so that one process would not compute it twice alike either"
            return replace(found, difference=None, unproven=why)
        if math.isnan(dealt.off):
            return replace(found, unproven="its gradient is not finite, in one process as well")
        return found

    def _obstacle(self) -> str:
        """Why no step can be compared, in words; "" = it can."""
        config = self._manager.config
        if not config.is_synchronous:
            return "ranks do not meet in every step, by the options"
        if config.grad_compression is not None:
            return f"grad_compression={config.grad_compression!r} sends less than the gradient"
        return ""

    @property
    def _seed(self) -> int:
        return draw_seed(int(self._trainer.args.seed), self._num_steps)

    @contextmanager
    def _without_optimizer(self) -> Iterator[None]:
        """No optimizer steps: a script's own training_step may, which would not be undone."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def refuse(*_: Any) -> None:
            raise NotPossibleError("an optimizer steps within the forward and backward pass of a micro-batch")

        handle = register_optimizer_step_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _pass(self) -> Iterator[Still]:
        """Around one pass over a step: begins with the state of the training, and restores it."""
        still = Still()
        with kept_training_state(self._trainer), tried_pass(self._trainer.model), still:
            yield still

    def _tried(self, model: nn.Module, given: Given, num_references: int) -> _Trial:
        """Computes the first micro-batches as one process, where that can be done. Collective."""
        why, seconds, still = "", 0.0, Still()
        gradient: list[float] = []
        try:
            given.dealt()
            gradient, still, seconds = self._as_one(model, given.part(num_references, None), self._seed)
        except NotPossibleError as error:
            why = str(error)
        except _ERRORS as error:
            if is_entered_below(error):
                raise SetupError(
                    f"{name_of(self._trainer, unsteered(self._trainer.compute_loss))} calls a part of the model by "
                    "itself, and a sharded model gathers its weights when the model itself is called.",
                    hint="Call the model that the loss is given, model(**inputs), and take what is needed from its "
                    "output (output_hidden_states=True gives the states before the head); or leave shard out.",
                ) from error
            if has_shards(self._trainer.model):
                raise
            if is_out_of_memory(error):
                why = "the script's own micro-batch does not fit on one device"
            else:
                why = f"it cannot be computed by itself ({type(error).__name__}: {str(error)[:200]})"
        ranks = [json.loads(text) for text in self._manager.gather_texts(json.dumps([why, seconds]))]
        whys = (why for why, _ in ranks if why)
        return _Trial(next(whys, ""), gradient, still, ranks[0][1])

    def _as_one(self, model: nn.Module, given: Given, seed: int) -> tuple[list[float], Still, float]:
        """The step as one process computes it, with nothing of ours between.

        Returns:
            A sketch of the gradient; what was seen of the losses; the seconds.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        is_sharded = has_shards(trainer.model)
        with ExitStack() as stack:
            still = stack.enter_context(self._pass())
            stack.enter_context(self._alone())
            inputs = [on_device(trainer, batch) for batch in given.of_one()]
            batches, num_items = self._feed.passes.count_as_given(inputs)
            begin = moment(trainer.args.device)
            gradient_state = accelerator.gradient_state
            before = gradient_state.sync_gradients
            training_step = unsteered(trainer.training_step)
            try:
                trainer.current_gradient_accumulation_steps = len(batches)
                for i, batch in enumerate(batches):
                    is_last = i == len(batches) - 1
                    gradient_state._set_sync_gradients(is_last)
                    with ExitStack() as each:
                        if not (is_sharded and is_last):  # Its gradient is a mean of equal ones.
                            each.enter_context(accelerator.no_sync(model))
                        _seed_all(draw_seed(seed, i))
                        self._feed.passes.mark(i)
                        random_state = read_random_state(trainer.args.device.type)
                        training_step(model, batch, num_items)
                        still.has_drawn |= read_random_state(trainer.args.device.type) != random_state
            finally:
                gradient_state._set_sync_gradients(before)
            seconds = Lap(begin, moment(trainer.args.device)).seconds()
            return sketch(trainer.model), still, seconds

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The script's own methods see rank 0 of one process, without another rank."""
        trainer, args = self._trainer, self._trainer.args
        before, self.is_alone = self.is_alone, True
        with ExitStack() as stack:
            stack.enter_context(counted_as_one_process(trainer))
            if self._own_code:
                stack.enter_context(without_other_ranks())
            stack.enter_context(self._feed.accumulation_of_script())
            stack.enter_context(instance_attribute(args, "average_tokens_across_devices", False))
            for name in ("compute_loss", "get_batch_samples"):
                stack.enter_context(instance_attribute(trainer, name, unsteered(getattr(trainer, name))))
            try:
                yield
            finally:
                self.is_alone = before

    def _as_dealt(self, model: nn.Module, given: Given, one: Sequence[float], still: Still) -> tuple[Difference, float]:
        """The step as the ranks share it, by the first weighing that makes up the step of one process. Collective."""
        feed, before = self._feed, self._feed.reduction
        found: list[tuple[Difference, float, LossReduction]] = []
        tables: list[Any] = []
        for way in self._ways(given, still):
            feed.passes.reduction = way
            table = self._table(given, way)
            if table in tables:
                continue
            tables.append(table)
            found.append((*self._dealt_once(model, given, one), way))
            if self._is_within(found[-1][0]):
                return found[-1][0], found[-1][1]
        off, seconds, way = min(found, key=lambda each: each[0].off)
        # What is declared stays as it is said; else the nearest is the best that is known.
        feed.passes.reduction = way if before.kind == AUTO else before
        return off, seconds

    def _is_within(self, found: Difference) -> bool:
        return is_within(found, rounding_bound(self._trainer))

    def _ways(self, given: Given, still: Still) -> list[LossReduction]:
        """Reductions to be tried, the one of the training first. Equal on all ranks."""
        reduction = self._feed.reduction
        asked = self._manager.config.loss_reduction
        is_shared = self._feed.passes.shares_micro_batches(given.sizes)
        if asked not in (AUTO, TOKEN_MEAN) or reduction.is_token_normalised or not is_shared:
            return [reduction]
        mine = self._offered(given, still)
        if asked == TOKEN_MEAN:  # Labels may be those of the next token.
            mine = [name for name in mine if name in (TOKENS, NEXT)]
        ranks = [json.loads(text) for text in self._manager.gather_texts(json.dumps(mine))]
        names = [name for name in ranks[0] if all(name in other for other in ranks)]
        tables = json.loads(self._manager.gather_texts(json.dumps(still.class_weights))[0])
        found = [replace(reduction, weighing=name, class_weights=tuple(tables)) for name in names]
        if reduction.kind == AUTO and self.first is None:
            return found
        return [reduction, *(way for way in found if way.weighing != reduction.weighing)]

    def _offered(self, given: Given, still: Still) -> list[str]:
        whole = [batch for batch in given.of_one() if isinstance(batch, Mapping)]
        parts = [m.inputs for m in given.dealt().micro_batches if not m.piece.is_filler]
        if len(whole) < len(given.sizes) or not all(isinstance(part, Mapping) for part in parts):
            return [ROWS, SUM]
        names = list(candidates(whole[0], len(still.class_weights)))
        return [name for name in names if not any(obstacle(part, name) for part in [*whole, *parts])]

    def _table(self, given: Given, way: LossReduction) -> Any:
        """What the parts of each micro-batch count on each rank: two ways with the same are one. Collective."""
        is_shared = self._feed.passes.shares_micro_batches(given.sizes)
        if way.is_token_normalised or way.weighing in (SUM, ROWS) or not is_shared:
            return way.kind if way.is_token_normalised else way.weighing
        with self._pass():
            ranks = self._feed.passes.weigh(self._counted(given)[0], way)
        totals = [sum(counts) for counts in zip(*ranks, strict=True)]
        return [
            [round(count / total, 12) if total else 0.0 for count, total in zip(r, totals, strict=True)] for r in ranks
        ]

    def _counted(self, given: Given) -> tuple[Step, Any]:
        step = given.dealt()
        return step, self._feed.passes.counted(step)

    def _dealt_once(self, model: nn.Module, given: Given, one: Sequence[float]) -> tuple[Difference, float]:
        manager, trainer = self._manager, self._trainer
        is_exchanged = isinstance(manager.config.strategy, DDP) and manager.identity.world_size > 1
        with self._pass():
            step, num_items = self._counted(given)
            manager.gather_floats([0.0])  # All ranks begin at once.
            begin = moment(trainer.args.device)
            try:
                for place in self._feed.passes.computed(model, step, num_items, is_synced=is_exchanged):
                    # A whole micro-batch draws what it draws in one process.
                    _seed_all(draw_seed(self._seed, place))
            except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
                raise SetupError(
                    f"A part of a micro-batch cannot be computed by itself ({type(error).__name__}: "
                    f"{str(error)[:200]}).",
                    hint=self._ways_out(),
                ) from error
            seconds = Lap(begin, moment(trainer.args.device)).seconds()
            mine = sketch(trainer.model)
        ranks = manager.gather_floats([*one, *mine])
        ones, dealt = [row[: len(one)] for row in ranks], [row[len(one) :] for row in ranks]
        names = names_of(trainer.model)
        if has_shards(trainer.model):
            return difference(ones, dealt, names), seconds
        if not is_exchanged and manager.identity.world_size > 1:
            mean = mean_of(dealt)
            return difference([mean_of(ones[:1])], [mean], names), seconds
        each = [difference([mine], [theirs], names) for mine, theirs in zip(ones, dealt, strict=True)]
        return max(each, key=lambda found: found.off), seconds

    def _drawn(self, given: Given, still: Still, *, is_random: bool) -> tuple[str, ...]:
        """What draws random numbers, of which ranks have others than one process. Collective."""
        mine = [still.has_dropped, given.is_drawn, given.are_rows_drawn, is_random]
        ranks = self._manager.gather_int64(mine)
        names = ("dropout", "the collator", "the data set", "the model or its loss")
        return tuple(name for name, found in zip(names, zip(*ranks, strict=True), strict=True) if any(found))

    def _draws(self, model: nn.Module, given: Given, one: Sequence[float]) -> bool:
        """True where one process does not compute the step twice alike, with other random numbers. Collective."""
        again = self._as_one(model, given, self._seed + 1)[0]
        names = names_of(self._trainer.model)
        off = difference([one], [again], names)
        return any(row[0] for row in self._manager.gather_floats([float(not self._is_within(off))]))

    def _say(self, found: Comparison, *, is_first: bool) -> None:
        if found.is_exact or (found.unproven and not self._is_unknown):
            if is_first and self._manager.identity.rank == 0:
                logger.info("%s", found)
            return
        if found.unproven:
            cause = f"it is not known how {name_of(self._trainer, unsteered(self._trainer.compute_loss))} is averaged"
            so = f"Parts of micro-batches count by this: {self._feed.reduction.weighing}."
            self._feed.tell(cause, f"{found}; {cause}.", so, self._ways_out())
            return
        off = found.difference
        assert off is not None
        norms = f"norm {off.other_norm:.6g} in place of {off.norm:.6g}"
        worst = f", most in {off.worst}" if off.worst else ""
        what = f"{found} ({norms}{worst}): this is not exactly the training of one process."
        own = f"The step has code of the script's own: {', '.join(self._own_code)}." if self._own_code else ""
        self._is_over = self._is_auto
        self._feed.tell(f"{found}", what, own, self._ways_out())

    @property
    def _is_auto(self) -> bool:
        return self._manager.config.check_first_step == "auto"

    @property
    def _is_unknown(self) -> bool:
        reduction = self._feed.reduction
        return reduction.kind == AUTO and self._feed.passes.shares_micro_batches(())

    def _ways_out(self) -> str:
        world_size = self._manager.identity.world_size
        if self._feed.passes.shares_micro_batches(()):
            return whole_ways(world_size)
        if self._feed.reduction.kind == TOKEN_SUM:
            return "Set loss_reduction='whole'."
        return (
            "What a micro-batch leaves for the next one (a counter, a moving average, the gradient so far) is not "
            "shared by ranks: let it depend on self.state.global_step, or do it once a step, in a callback's "
            "on_pre_optimizer_step; gradient_accumulation_steps=1 makes it the same again."
        )


def _affordable(num_references: int, num_ranks: int, seconds: float) -> int:
    """How many micro-batches may be computed in both ways, by the seconds of one."""
    each = max(seconds, 1e-6) * (1 + 1 / num_ranks)
    most = max(1, int(_MOST_S / each))
    return min(num_references, max(most, min(num_ranks, num_references)))


def _seed_all(seed: int) -> None:
    import random

    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
