"""How ranks agree on the point where they stop, without a collective."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Protocol

from torch.distributed import Store

from unsloth_multigpu.wire.control import ControlPage
from unsloth_multigpu.wire.process import is_alive, only_here
from unsloth_multigpu.wire.wait import wait_until

# The points of one training use the low 44 bits of a number; the training's index is above them.
_TRAINING_BITS = 44


class Agreement(Protocol):
    """Finds the point where all ranks stop, while none waits for another.

    All ranks pass the same points in the same order, but how far apart they are is not known: a GPU may be steps
    behind its process. So each rank first says which point it has come to, and then looks whether a stop was asked
    for. The first rank that sees the question sets the stop at the first point after all points that were said. No
    rank has passed that point: a rank that passed it without seeing the question had said its own point before, and
    that one was counted. Hence all ranks stop at the same point.
    """

    def is_reached(self, point: int) -> int:
        """Says that this rank has come to `point`, and looks whether a signal asks for a stop.

        Returns:
            The signal for which all ranks stop here, 0 = continue.
        """

    def leave(self, deadline_s: float) -> bool:
        """Waits until all ranks have come to it. False where they have not by the deadline."""


class PageAgreement:
    """The ranks of one machine, by a page of shared memory. About 6 microseconds for each point.

    Args:
        page: The run's page, which holds the signal that asks for a stop.
        local_rank: This rank.
    """

    def __init__(self, page: ControlPage, local_rank: int) -> None:
        self._page = page
        self._local_rank = local_rank
        trained = page.points()[local_rank] >> _TRAINING_BITS
        self._base = (trained + 1) << _TRAINING_BITS

    def is_reached(self, point: int) -> int:
        page, point = self._page, self._base + point
        # Without a lock this rank might read the page before another rank's write becomes visible.
        with page.lock():
            page.set_point(self._local_rank, point)
            if page.signal and not page.stop_point:
                page.stop_point = max(page.points()) + 1
            return page.signal if 0 < page.stop_point <= point else 0

    def leave(self, deadline_s: float) -> bool:
        self._page.set_left(self._local_rank, os.getpid())
        if not wait_until(lambda: all(self._page.left()), deadline_s):
            return False
        first_pid = self._page.left()[0]
        if first_pid != os.getpid():
            # Trackers finish their work when local rank 0 ends; the engine ends all with the first process that ends.
            atexit.register(only_here(wait_until), lambda: not is_alive(first_pid), deadline_s)
        return True


class StoreAgreement:
    """Ranks of several machines, or of another launcher, by their store: a round trip for each point.

    Args:
        store: The ranks' store. Its server does one thing after the other.
        rank: This rank.
        world_size: Number of ranks.
        asked: The signal that asks this rank to stop, 0 = none.
    """

    def __init__(self, store: Store, rank: int, world_size: int, asked: Callable[[], int]) -> None:
        training = store.add(f"preempt/trainings/{rank}", 1)
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._asked = asked
        self._prefix = f"preempt/{training}"

    def is_reached(self, point: int) -> int:
        store = self._store
        store.set(f"{self._prefix}/point/{self._rank}", str(point))
        if signal_number := self._asked():
            store.compare_set(f"{self._prefix}/signal", "", str(signal_number))
        elif not store.check([f"{self._prefix}/signal"]):
            return 0
        points = [self._point(rank) for rank in range(self._world_size)]
        stop_point = int(store.compare_set(f"{self._prefix}/stop_point", "", str(max(points) + 1)))
        return int(store.get(f"{self._prefix}/signal")) if stop_point <= point else 0

    def _point(self, rank: int) -> int:
        key = f"{self._prefix}/point/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def leave(self, deadline_s: float) -> bool:
        key = f"{self._prefix}/left"
        self._store.add(key, 1)
        return wait_until(lambda: self._store.add(key, 0) == self._world_size, deadline_s)


class AloneAgreement:
    """One rank.

    Args:
        asked: The signal that asks it to stop, 0 = none.
    """

    def __init__(self, asked: Callable[[], int]) -> None:
        self._asked = asked

    def is_reached(self, point: int) -> int:
        return self._asked()

    def leave(self, deadline_s: float) -> bool:
        return True
