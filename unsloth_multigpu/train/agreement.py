"""How ranks agree on the point where they stop, without a collective and without waiting for each other."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from unsloth_multigpu.wire.process import is_alive, only_here
from unsloth_multigpu.wire.wait import wait_until

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

# The points of one training use the low 44 bits of a number; the training's index is above them.
_TRAINING_BITS = 44


class Agreement:
    """Finds the point where all ranks stop, while none waits for another.

    All ranks pass the same points in the same order, but how far apart they are is not known: a GPU may be steps
    behind its process. So each rank first says which point it has come to, and then looks whether a stop was asked
    for. The first rank that sees the question sets the stop at the first point after all points that were said. No
    rank has passed that point: a rank that passed it without seeing the question had said its own point before, and
    that one was counted. Hence all ranks stop at the same point. It takes a round trip to the store for each point.

    Args:
        manager: This rank's manager.
        asked: The signal that asks this rank to stop, 0 = none.
    """

    def __init__(self, manager: DDPManager, asked: Callable[[], int]) -> None:
        self._board = manager
        self._identity = manager.identity
        self._ranks = range(manager.identity.world_size)
        self._asked = asked
        self._training = manager.count(f"stop/trainings/{self._identity.rank}") if len(self._ranks) > 1 else 0

    def is_reached(self, point: int) -> int:
        """Says that this rank has come to `point`, and looks whether a signal asks for a stop.

        Returns:
            The signal for which all ranks stop here, 0 = continue.
        """
        if len(self._ranks) == 1:
            return self._asked()
        board, prefix = self._board, f"stop/{self._training}"
        point += self._training << _TRAINING_BITS
        board.publish(f"stop/point/{self._identity.rank}", str(point))
        mine = self._asked()
        told = board.claim(f"{prefix}/signal", str(mine)) if mine else board.read(f"{prefix}/signal")
        if told is None:
            return 0
        points = [int(board.read(f"stop/point/{rank}") or 0) for rank in self._ranks]
        stop_point = int(board.claim(f"{prefix}/point", str(max(points) + 1)))
        return int(told) if stop_point <= point else 0

    def leave(self, deadline_s: float) -> bool:
        """Waits until all ranks have come to it. False where they have not by the deadline."""
        if len(self._ranks) == 1:
            return True
        keys = [f"stop/{self._training}/left/{rank}" for rank in self._ranks]
        self._board.publish(keys[self._identity.rank], str(os.getpid()))
        if not wait_until(lambda: all(map(self._board.is_published, keys)), deadline_s):
            return False
        first_pid = int(self._board.read(keys[self._identity.rank - self._identity.local_rank]) or 0)
        if first_pid != os.getpid():
            # Trackers finish their work when local rank 0 ends; the engine ends all with the first process that ends.
            atexit.register(only_here(wait_until), lambda: not is_alive(first_pid), deadline_s)
        return True
