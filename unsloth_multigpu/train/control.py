"""Makes all ranks follow rank 0's `TrainerControl`, which callbacks change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import GradientExchange, Part
from unsloth_multigpu.train.lead import Lead, Moment
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike

logger = get_logger(__name__)

_FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


class OneDecision(Part):
    """Copies rank 0's `control` to all ranks before the loop acts on it.

    Callbacks run on every rank and need not agree: they may read a clock, their own GPU, or decide on rank 0 only. An
    evaluation, a save or a stop on one rank alone would hang.

    Rank 0 publishes its flags and continues; the other ranks read them, see `Lead`. Ranks that step independently do
    not wait for each other: between two synchronizations they follow the arguments of the training, such as
    `save_steps`, and decisions of callbacks take effect at the next synchronization.
    """

    place = "decision"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, lead: Lead, exchange: GradientExchange) -> None:
        super().__init__(trainer, manager)
        self._rank = manager.identity.rank
        self._lead = lead
        self._exchange = exchange
        self._is_log_due = False
        self._postponed = 0
        # Flags that rank 0 has set so far; and flags that only this rank has set, with the step.
        self._flags_of_rank_0 = 0
        self._overruled: dict[str, int] = {}

    @contextmanager
    def around(self) -> Iterator[None]:
        """Warns at the end about decisions that had no effect."""
        yield
        for name, step in self._overruled.items():
            if name not in _names(self._flags_of_rank_0):
                logger.warning(
                    "a callback of rank %d has set control.%s after step %d, and none of rank 0 did: rank 0's decision "
                    "counts. Let the callback decide alike on all ranks",
                    self._rank,
                    name,
                    step,
                )
        if self._postponed:
            logger.warning("%s came too late for another step", ", ".join(_names(self._postponed)))

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._agree(Moment.STEP, control)
        self._note_log(control)

    def on_substep_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._agree(Moment.SUBSTEP, control)

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._agree(Moment.EPOCH, control)
        self._note_log(control)

    def on_log(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # A script may log on one rank only. The first call after a step is the loop's own, on all ranks.
        is_loops, self._is_log_due = self._is_log_due, False
        if is_loops:
            self._agree(Moment.LOG, control)

    def on_evaluate(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._agree(Moment.EVALUATION, control)

    def on_save(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._agree(Moment.SAVE, control)

    def _note_log(self, control: ControlLike) -> None:
        step = self._trainer.state.global_step
        self._is_log_due = control.should_log and step > self._trainer._globalstep_last_logged

    def _agree(self, moment: Moment, control: ControlLike) -> None:
        """Writes rank 0's flags into `control`. Raises as `Lead.follow`."""
        step = int(self._trainer.state.global_step)
        mine = _flags_of(control)
        if not self._exchange.may_stop and moment in (Moment.STEP, Moment.SUBSTEP, Moment.EPOCH):
            found = mine & self._scheduled(moment)
            self._postpone(mine & ~found, step)
        else:
            # All ranks reach this point: they have just computed, logged, evaluated or saved together.
            mine, self._postponed = mine | self._postponed, 0
            found = self._lead.follow(moment, mine, step)
            self._flags_of_rank_0 |= found
        for name in _names(mine & ~found):
            self._overruled.setdefault(name, step)
        for i, name in enumerate(_FLAGS):
            setattr(control, name, bool(found >> i & 1))

    def _scheduled(self, moment: Moment) -> int:
        """Returns the flags that the arguments of the training set here, equal on all ranks."""
        from transformers import DefaultFlowCallback

        flow, control = DefaultFlowCallback(), SimpleNamespace(**dict.fromkeys(_FLAGS, False))
        event: Any = {Moment.STEP: flow.on_step_end, Moment.EPOCH: flow.on_epoch_end}.get(moment, flow.on_substep_end)
        event(self._trainer.args, self._trainer.state, control)
        return _flags_of(control)

    def _postpone(self, flags: int, step: int) -> None:
        if flags & ~self._postponed and self._rank == 0:
            logger.info(
                "%s after step %d waits for the next synchronization of the ranks", ", ".join(_names(flags)), step
            )
        self._postponed |= flags


def _flags_of(control: Any) -> int:
    return sum(bool(getattr(control, name)) << i for i, name in enumerate(_FLAGS))


def _names(flags: int) -> list[str]:
    return [name for i, name in enumerate(_FLAGS) if flags >> i & 1]
