"""Rank 0 leads: its words count on all ranks, which read them in their store. No collective."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from unsloth_multigpu.errors import DistributedError, DivergenceError
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

# Left by a rank that does not wait for rank 0: it has passed this point, and nothing can be decided there any more.
PASSED = -1
# Left by rank 0 ahead of all ranks: a rank that comes to this point waits for its word.
WAIT = -2

# How many points a rank may be ahead of another; between two collectives there are a few. A key is used again after so
# many, also in the next training, so that none has to be deleted.
_RING = 4096
_HINT = "Let no callback work this long on rank 0 alone, or raise timeout_s."


class Moment(enum.IntEnum):
    """Where Hugging Face's loop is about to read what callbacks have decided."""

    STEP = 0
    SUBSTEP = 1
    EPOCH = 2
    LOG = 3
    EVALUATION = 4
    SAVE = 5


class Lead:
    """Two rows of whole numbers from 0 on, each in its numbered place: words and claims.

    Words are rank 0's alone: it writes one and continues, the others read it, a round trip to the store. Where rank 0
    is behind they wait for it, as they would in the next collective. A claim belongs to the rank that comes first.

    Args:
        manager: This rank's manager.
        beat: This rank's page of beats.
    """

    def __init__(self, manager: DDPManager, beat: HeartbeatPage) -> None:
        self._manager = manager
        self._beat = beat
        self._rank = manager.identity.rank
        self._training = self._num_words = 0

    def begin(self) -> None:
        """Begins a training, whose number is rank 0's: numbers of other trainings count as not written. Collective."""
        training = self._manager.count("lead/trainings") if self._rank == 0 else 0
        self._training, self._num_words = self._manager.gather_int64([training])[0][0], 0

    def follow(self, moment: Moment, mine: int, step: int) -> int:
        """Rank 0's number at a moment that all ranks come to, in the same order; `mine` is this rank's.

        Raises:
            RankTimeoutError: Rank 0 did not come to this moment.
            DivergenceError: Rank 0 came to another one.
            DistributedError: Rank 0 has left the cell, or is too far ahead.
        """
        index, kinds = self._num_words, len(Moment)
        self._num_words += 1
        if self._rank == 0:
            self._publish("word", index, mine * kinds + moment)
            return mine
        found = self._wait("word", index, moment, step)
        if found == PASSED:
            raise DistributedError(f"rank 0 is {_RING} decisions ahead of this rank.", hint="Report this message.")
        word, there = divmod(found, kinds)
        if there != moment:
            raise DivergenceError(
                f"After step {step} rank {self._rank} has come to the callbacks of a {moment.name.lower()}, rank 0 to "
                f"those of a {Moment(there).name.lower()}.",
                hint="Let all ranks call train(), evaluate() and save on the same way.",
            )
        return word

    def claim(self, index: int, word: int) -> int:
        """Writes claim `index` unless another rank has. Returns what is there then."""
        key = self._key("claim", index)
        before = self._manager.read(key)
        there = self._number(before, index)
        if there is None:
            there = self._number(self._manager.claim(key, self._text(index, word), before), index)
        return PASSED if there is None else there

    def settle(self, index: int, word: int) -> None:
        """Rank 0 replaces its own claim."""
        self._publish("claim", index, word)

    def wait_for_claim(self, index: int, moment: Moment, step: int) -> int:
        """Claim `index`, once it is there and not `WAIT`."""
        return self._wait("claim", index, moment, step)

    def _wait(self, row: str, index: int, moment: Moment, step: int) -> int:
        """Waits for rank 0, which may be slower, or busy in a callback."""
        manager, key = self._manager, self._key(row, index)

        def read() -> int | None:
            found = self._number(manager.read(key), index)
            return None if found == WAIT else found

        found = read()
        if found is not None:
            return found
        what = f"what rank 0's callbacks decide after step {step} ({moment.name.lower()})"
        with self._beat.within(Phase.AGREE), manager.waits.counted():
            return manager.wait(read, what, timeout_s=manager.config.timeout_s, hint=_HINT)

    def _publish(self, row: str, index: int, word: int) -> None:
        self._manager.publish(self._key(row, index), self._text(index, word))

    def _key(self, row: str, index: int) -> str:
        return f"lead/{row}/{index % _RING}"

    def _text(self, index: int, word: int) -> str:
        return f"{self._training} {index} {word}"

    def _number(self, text: str | None, index: int) -> int | None:
        """The number in a key's value, None where it is an earlier place's; a later one's says that this is passed."""
        if text is None:
            return None
        training, there, word = map(int, text.split())
        if (training, there) < (self._training, index):
            return None
        return word if (training, there) == (self._training, index) else PASSED
