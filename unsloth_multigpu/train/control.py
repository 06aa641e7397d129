"""What callbacks decide is one decision: rank 0's `TrainerControl` counts on all ranks."""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from unsloth_multigpu.errors import DivergenceError, RankTimeoutError
from unsloth_multigpu.group.manager import DDPManager, left_alone
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.train.decision import PASSED, WAIT, Board, PageBoard, StoreBoard, wait_for_word
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.beat import BeatPage, Phase

logger = get_logger(__name__)

_FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
_ALL_FLAGS = (1 << len(_FLAGS)) - 1
_STOPS = 0b11000
# Ranks that read a clock reach a limit a step or two apart. Decisions of rank 0 within so few steps are the same one.
_NEAR_STEPS = 10


class Moment(enum.IntEnum):
    """Where Hugging Face's loop is about to read what callbacks have decided."""

    STEP = 0
    SUBSTEP = 1
    EPOCH = 2
    LOG = 3
    EVALUATION = 4
    SAVE = 5


class OneDecision(Part):
    """Lets rank 0's `control` count on all ranks, before the loop acts on it.

    Callbacks run on every rank and need not agree: they look at a clock, at their own GPU, or decide on rank 0 only. An
    evaluation, a save or a stop on one rank alone would leave the others waiting for it.

    Rank 0 writes its flags and continues. The other ranks read them and take them over, which costs microseconds
    on one machine and a round trip to the store over several. Where rank 0 is behind they wait for it, as they would
    in the next collective.

    Ranks that step by themselves (`config.meets_every_step` is False) do not wait at each step. A rank without a flag
    passes; one with a flag, which is about to meet the others, waits for rank 0's word. Where some rank has passed
    before rank 0 decided, the decision is for the first step that no rank has come to.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        run_dir: The run's private folder, None without a supervisor of ours.
        beat: This rank's page of beats.
    """

    place = "decision"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, run_dir: str | None, beat: BeatPage) -> None:
        self._trainer = trainer
        self._manager = manager
        self._run_dir = run_dir
        self._beat = beat
        self._rank = manager.identity.rank
        self._is_together = manager.config.meets_every_step
        self._board: Board | None = None
        self._num_words = 0
        self._is_log_due = self._has_saved = False
        # Flags of substeps that wait for the end of the step; flags of rank 0 that wait for a later step, and which.
        self._held_stops = 0
        self._postponed, self._postponed_to = 0, -1
        self._overruled = Overruled(self._rank)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Opens the board on which rank 0 writes. Collective."""
        identity = self._manager.identity
        is_one_machine = self._run_dir is not None and identity.world_size == identity.local_world_size
        board = PageBoard(self._run_dir or "") if is_one_machine else StoreBoard(self._manager.store)
        with closing(board):
            training = board.next_training() if identity.rank == 0 else 0
            board.begin(self._manager.gather_int64([training])[0][0])
            self._board = board
            yield
            self._overruled.end()
            if self._postponed:
                logger.warning("%s came too late for another step", ", ".join(_names(self._postponed)))

    def overrides(self) -> dict[str, Override]:
        return {
            "_maybe_log_save_evaluate": self._log_save_evaluate,
            "log": self._log,
            "_evaluate": self._evaluate,
            "_save_checkpoint": self._save,
        }

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.agree(Moment.STEP, control)

    def on_substep_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.agree(Moment.SUBSTEP, control)

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.agree(Moment.EPOCH, control)

    def agree(self, moment: Moment, control: ControlLike) -> None:
        """Writes rank 0's flags into `control`.

        Raises:
            RankTimeoutError: Rank 0 did not come to this place.
            DivergenceError: Rank 0 came to another place.
        """
        mine = sum(bool(getattr(control, name)) << i for i, name in enumerate(_FLAGS)) | self._held_stops
        self._held_stops = 0
        if moment == Moment.SUBSTEP and not self._is_together:
            self._held_stops, word = mine & _STOPS, mine & ~_STOPS
        elif self._is_together or moment not in (Moment.STEP, Moment.EPOCH):
            word = self._together(moment, mine)
        else:
            word = self._apart(moment, mine)
        for i, name in enumerate(_FLAGS):
            setattr(control, name, bool(word >> i & 1))
        if self._rank > 0:
            self._overruled.note(self._step, mine, word)

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    def _together(self, moment: Moment, mine: int) -> int:
        """For ranks that meet at every step: rank 0's flags become those of all ranks."""
        board, index = self._checked_board(), self._num_words
        self._num_words += 1
        if self._rank == 0:
            board.put(index, mine | moment << len(_FLAGS))
            return mine
        word = board.get(index)
        if word is None:
            word = self._wait(functools.partial(board.get, index), moment)
        if word >> len(_FLAGS) != moment:
            there = Moment(word >> len(_FLAGS)).name.lower()
            raise DivergenceError(
                f"After step {self._step} rank {self._rank} has come to the callbacks of a {moment.name.lower()}, rank "
                f"0 to those of a {there}.",
                hint="Let all ranks call train(), evaluate() and save on the same way.",
            )
        return word & _ALL_FLAGS

    def _apart(self, moment: Moment, mine: int) -> int:
        """For ranks that step by themselves: no rank waits, except where the ranks meet."""
        board, index = self._checked_board(), 2 * self._step + (moment == Moment.EPOCH)
        if self._rank == 0:
            return self._decide(board, index, mine)
        word = board.look(index) if mine else board.claim(index, PASSED)
        if word is None or word == WAIT:
            word = self._wait(functools.partial(board.look, index), moment)
        return 0 if word == PASSED else word

    def _decide(self, board: Board, index: int, mine: int) -> int:
        if index == self._postponed_to:
            mine, self._postponed, self._postponed_to = mine | self._postponed, 0, -1
            board.settle(index, mine)
            return mine
        if board.claim(index, mine) != PASSED or not mine:
            return mine
        if self._postponed_to < 0:
            self._postponed_to = index + 2 - index % 2
            while board.claim(self._postponed_to, WAIT) == PASSED:
                self._postponed_to += 2
        self._postponed |= mine
        logger.info(
            "%s after step %d is for step %d: ranks that step by themselves have passed it",
            ", ".join(_names(mine)),
            self._step,
            self._postponed_to // 2,
        )
        return 0

    def _wait(self, read: Callable[[], int | None], moment: Moment) -> int:
        """Waits for rank 0, which may be slower, or busy in a callback."""
        timeout_s = self._manager.config.timeout_s
        deadline_s = time.monotonic() + timeout_s

        def turn() -> None:
            what = f"what rank 0's callbacks decide after step {self._step} ({moment.name.lower()})"
            # Asked first, so that a word that rank 0 wrote before it left is still read below.
            if self._manager.is_abandoned() and read() is None:
                raise left_alone(self._rank, what)
            if time.monotonic() > deadline_s:
                raise RankTimeoutError(
                    f"rank {self._rank} waited {timeout_s:g} seconds for {what}.",
                    hint="Let no callback work this long on rank 0 alone, or raise timeout_s.",
                )

        with self._beat.within(Phase.AGREE), self._manager.waits.counted():
            return wait_for_word(read, self._checked_board().longest_pause_s, turn)

    def _checked_board(self) -> Board:
        assert self._board is not None
        return self._board

    def _log_save_evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer._maybe_log_save_evaluate`, which reads each flag after it has acted on those before."""
        trainer = self._trainer
        self._is_log_due = trainer.control.should_log and self._step > trainer._globalstep_last_logged
        self._has_saved = False
        result = original(*args, **kwargs)
        self._is_log_due = False
        if self._has_saved:
            self.agree(Moment.SAVE, trainer.control)
        return result

    def _log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.log`. Only the loop's own call is made by every rank; it is the first one after the step."""
        is_loops, self._is_log_due = self._is_log_due, False
        result = original(*args, **kwargs)
        if is_loops:
            self.agree(Moment.LOG, self._trainer.control)
        return result

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer._evaluate`, by which the loop evaluates."""
        result = original(*args, **kwargs)
        self.agree(Moment.EVALUATION, self._trainer.control)
        return result

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer._save_checkpoint`, after which callbacks are told."""
        self._has_saved = True
        return original(*args, **kwargs)


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
        for name, since in list(self._asked.items()):
            if step - since >= _NEAR_STEPS:
                self._tell(name, since)

    def end(self) -> None:
        """The training is over."""
        for name, since in list(self._asked.items()):
            self._tell(name, since)

    def _tell(self, name: str, step: int) -> None:
        del self._asked[name]
        if name not in self._told:
            self._told.add(name)
            logger.warning(
                "a callback of rank %d has set control.%s after step %d, and none of rank 0 did: rank 0's word counts. "
                "Let the callback decide alike on all ranks",
                self._rank,
                name,
                step,
            )


def _names(flags: int) -> list[str]:
    return [name for i, name in enumerate(_FLAGS) if flags >> i & 1]
