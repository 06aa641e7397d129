"""Publishes rank 0's decisions in the store, from which the other ranks read them.

This is no collective: rank 0 publishes a value and continues. Keys are used again after `_RING` points, so that none
has to be deleted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from unsloth_multigpu.errors import DistributedError, DivergenceError
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

# Between two collectives, a rank can only be a few points ahead of another.
_RING = 4096
_HINT = "Let no callback work this long on rank 0 alone, or raise timeout_s."


class Moment(enum.IntEnum):
    """The points of Hugging Face's loop at which the ranks read rank 0's decision."""

    STEP = 0
    SUBSTEP = 1
    EPOCH = 2
    LOG = 3
    EVALUATION = 4
    SAVE = 5
    BATCH = 6  # A batch of an evaluation.
    END = 7


class Lead:
    """Rank 0's decisions in one training: the flags of its callbacks, and the signal on which all ranks stop.

    Attributes:
        asked: Returns the signal that this rank has received, 0 = none.
        signal_number: The signal on which all ranks stop, 0 = none. It only changes inside `follow`.
    """

    def __init__(self, manager: DDPManager, beat: HeartbeatPage) -> None:
        self._manager = manager
        self._beat = beat
        self._training = 0
        self._num_points = 0
        self._has_asked = False
        self.asked: Callable[[], int] = lambda: 0
        self.signal_number = 0

    def begin(self) -> None:
        """Called when all ranks start a training. Its number separates its keys from those of other trainings."""
        self._training = self._manager.number_of_training()

    @property
    def name(self) -> str:
        """Prefix of this training's keys."""
        return f"lead/{self._training}"

    def follow(self, moment: Moment, flags: int, step: int) -> int:
        """Returns rank 0's flags at a point that all ranks reach in the same order. `flags` are this rank's.

        Raises:
            RankTimeoutError: Rank 0 did not reach this point.
            DivergenceError: Rank 0 reached another point.
            DistributedError: Rank 0 has left the cell, or is too far ahead.
        """
        manager, index = self._manager, self._num_points
        asked = self.signal_number or self.asked()
        if manager.identity.world_size == 1:
            self.signal_number = asked
            return flags
        self._num_points += 1
        asked_key = f"{self.name}/asked"
        if manager.identity.rank == 0:
            self.signal_number = asked or int(manager.read(asked_key) or 0)
            word = (self._training, index, int(moment), flags, self.signal_number)
            manager.publish(self._key(index), " ".join(map(str, word)))
            return flags
        if asked and not self._has_asked:
            self._has_asked = True
            manager.publish(asked_key, str(asked))
        there, word_flags, self.signal_number = self._wait(index, moment, step)
        if there != moment:
            raise DivergenceError(
                f"After step {step} rank {manager.identity.rank} has come to the callbacks of a {moment.name.lower()}, "
                f"rank 0 to those of a {Moment(there).name.lower()}.",
                hint="Let all ranks call train(), evaluate() and save on the same way.",
            )
        return word_flags

    def _wait(self, index: int, moment: Moment, step: int) -> list[int]:
        """Waits for rank 0, which may be slower, or busy in a callback."""
        if (found := self._read(index)) is not None:
            return found
        what = f"what rank 0's callbacks decide after step {step} ({moment.name.lower()})"
        manager = self._manager
        with self._beat.within(Phase.AGREE), manager.waits.counted():
            return manager.wait(lambda: self._read(index), what, timeout_s=manager.config.timeout_s, hint=_HINT)

    def _read(self, index: int) -> list[int] | None:
        """Returns moment, flags and signal of a point; None if rank 0 has not reached it."""
        text = self._manager.read(self._key(index))
        if text is None:
            return None
        training, there, *word = map(int, text.split())
        if (training, there) > (self._training, index):
            raise DistributedError(f"rank 0 is {_RING} decisions ahead of this rank.", hint="Report this message.")
        return word if (training, there) == (self._training, index) else None

    def _key(self, index: int) -> str:
        return f"lead/point/{index % _RING}"
