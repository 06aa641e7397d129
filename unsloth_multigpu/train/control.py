"""What callbacks decide is one decision: rank 0's `TrainerControl` counts on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.train.lead import PASSED, WAIT, Lead, Moment
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

logger = get_logger(__name__)

_FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
_STOPS = 0b11000
# Ranks that read a clock reach a limit a step or two apart. Decisions of rank 0 within so few steps are the same one.
_NEAR_STEPS = 10


class OneDecision(Part):
    """Lets rank 0's `control` count on all ranks, before the loop acts on it.

    Callbacks run on every rank and need not agree: they look at a clock, at their own GPU, or decide on rank 0 only. An
    evaluation, a save or a stop on one rank alone would leave the others waiting for it.

    Rank 0 writes its flags and continues; the other ranks take them over, see `Lead`. Ranks that step by themselves
    (`config.is_synchronous` is False) do not wait at each step. A rank without a flag passes; one with a flag, which
    is about to synchronize with the others, waits for rank 0's word. If a rank is already past this step, rank 0's
    decision takes effect at the first step that no rank has reached.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        beat: This rank's page of beats.
    """

    place = "decision"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, beat: HeartbeatPage) -> None:
        self._trainer = trainer
        self._lead = Lead(manager, beat)
        self._rank = manager.identity.rank
        self._is_together = manager.config.is_synchronous
        self._is_log_due = False
        # Flags of substeps that wait for the end of the step; flags of rank 0 that wait for a later step, and which.
        self._held_stops = 0
        self._postponed, self._postponed_to = 0, -1
        self._overruled = Overruled(self._rank)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Lets rank 0 lead this training. Collective."""
        self._lead.begin()
        yield
        self._overruled.tell(self._step)
        if self._postponed:
            logger.warning("%s came too late for another step", ", ".join(_names(self._postponed)))

    def overrides(self) -> dict[str, Override]:
        return {
            "_maybe_log_save_evaluate": self._log_save_evaluate,
            "log": self._log,
        }

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.agree(Moment.STEP, control)

    def on_substep_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.agree(Moment.SUBSTEP, control)

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.agree(Moment.EPOCH, control)

    def on_evaluate(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.agree(Moment.EVALUATION, control)

    def on_save(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.agree(Moment.SAVE, control)

    def agree(self, moment: Moment, control: ControlLike) -> None:
        """Writes rank 0's flags into `control`. Raises as `Lead.follow`."""
        mine = sum(bool(getattr(control, name)) << i for i, name in enumerate(_FLAGS)) | self._held_stops
        self._held_stops = 0
        if moment == Moment.SUBSTEP and not self._is_together:
            self._held_stops, word = mine & _STOPS, mine & ~_STOPS
        elif self._is_together or moment not in (Moment.STEP, Moment.EPOCH):
            word = self._lead.follow(moment, mine, self._step)
        else:
            word = self._apart(moment, mine)
        for i, name in enumerate(_FLAGS):
            setattr(control, name, bool(word >> i & 1))
        if self._rank > 0:
            self._overruled.note(self._step, mine, word)

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    def _apart(self, moment: Moment, mine: int) -> int:
        """For ranks that step by themselves: no rank waits, except where the ranks meet."""
        index = 2 * self._step + (moment == Moment.EPOCH)
        if self._rank == 0:
            return self._decide(index, mine)
        if mine or (word := self._lead.claim(index, PASSED)) == WAIT:
            word = self._lead.wait_for_claim(index, moment, self._step)
        return 0 if word == PASSED else word

    def _decide(self, index: int, mine: int) -> int:
        if index == self._postponed_to:
            mine, self._postponed, self._postponed_to = mine | self._postponed, 0, -1
            self._lead.settle(index, mine)
            return mine
        if self._lead.claim(index, mine) != PASSED or not mine:
            return mine
        if self._postponed_to < 0:
            self._postponed_to = index + 2 - index % 2
            while self._lead.claim(self._postponed_to, WAIT) == PASSED:
                self._postponed_to += 2
        self._postponed |= mine
        logger.info(
            "%s after step %d is for step %d: ranks that step by themselves have passed it",
            ", ".join(_names(mine)),
            self._step,
            self._postponed_to // 2,
        )
        return 0

    def _log_save_evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer._maybe_log_save_evaluate`, which reads each flag after it has acted on those before."""
        trainer = self._trainer
        self._is_log_due = trainer.control.should_log and self._step > trainer._globalstep_last_logged
        result = original(*args, **kwargs)
        self._is_log_due = False
        return result

    def _log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.log`. Only the loop's own call is made by every rank; it is the first one after the step."""
        is_loops, self._is_log_due = self._is_log_due, False
        result = original(*args, **kwargs)
        if is_loops:
            self.agree(Moment.LOG, self._trainer.control)
        return result


class Overruled:
    """Logs flags that a rank above 0 has set and rank 0 has not.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Flag -> step: set by rank 0 last; set here first, while rank 0 did not.
        self._said: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._told: set[str] = set()

    def note(self, step: int, mine: int, word: int) -> None:
        """After an agreement: `mine` are this rank's flags, `word` rank 0's."""
        for name in _names(word):
            self._said[name] = step
            self._asked.pop(name, None)
        for name in _names(mine & ~word):
            if step - self._said.get(name, -_NEAR_STEPS) >= _NEAR_STEPS:
                self._asked.setdefault(name, step)
        self.tell(step - _NEAR_STEPS)

    def tell(self, last_step: int) -> None:
        """Logs each flag, once, that was set up to `last_step`, since rank 0 has not set it yet."""
        for name, step in [(name, step) for name, step in self._asked.items() if step <= last_step]:
            del self._asked[name]
            if name not in self._told:
                self._told.add(name)
                logger.warning(
                    "a callback of rank %d has set control.%s after step %d, and none of rank 0 did: rank 0's word "
                    "counts. Let the callback decide alike on all ranks",
                    self._rank,
                    name,
                    step,
                )


def _names(flags: int) -> list[str]:
    return [name for i, name in enumerate(_FLAGS) if flags >> i & 1]
