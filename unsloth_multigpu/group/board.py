"""What ranks tell each other without a collective: values under names, in the store that they share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import Store

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.wire.wait import wait_until

_Found = TypeVar("_Found")

# Before each value: an empty one would be the same as none for some versions of the store.
_MARK = "="
_NONE = "?"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.02
# Limit of the time from a `set` until other ranks read the value.
_IN_FLIGHT_S = 1.0
# A rank that waits sleeps for this part of the time that it has waited.
_PAUSES_PER_WAIT = 8
_HINT = "Call it on all ranks, or raise timeout_s where it only takes long."


class Board:
    """The store of the ranks. It works before there is a process group, and in code that only some ranks reach.

    A name is published once, numbered where there are several of a kind; or each value replaces the one before.

    Attributes:
        is_abandoned: True where rank 0 (for rank 0: all others) has left the code that this rank runs, and publishes
            nothing more in it.
    """

    def __init__(self, rank: int, store: Store | None = None) -> None:
        self.rank = rank
        self.is_abandoned: Callable[[], bool] = lambda: False
        self._store = store
        self._num_trainings = 0

    @property
    def store(self) -> Store:
        """Keys and values shared by all ranks."""
        assert self._store is not None
        return self._store

    def number_of_training(self) -> int:
        """One more than the last one of this store: the same on ranks that begin the same trainings."""
        self._num_trainings += 1
        return self._num_trainings

    def publish(self, key: str, value: str = "") -> None:
        """Lets other ranks see `key`. Does not wait for the store."""
        self.store.set(key, _MARK + value)

    def read(self, key: str) -> str | None:
        """The value of `key`, None as long as no rank has published it. One round trip; does not wait for a rank."""
        # `get` would wait, and `check` before it is a second round trip. This replaces nothing: no value is `_NONE`.
        found = self.store.compare_set(key, _NONE, _NONE).decode()
        return None if found == _NONE else found.removeprefix(_MARK)

    def is_published(self, key: str) -> bool:
        """True once some rank has published `key`. Does not wait."""
        return self.read(key) is not None

    def meet(self, world_size: int, *, timeout_s: float, hint: str) -> None:
        """Waits for the other ranks, in Python, where signals and other threads reach it.

        A process group would name a key of its store that is missing. Each rank may call this once for a store, or
        again without waiting.

        Raises:
            RankTimeoutError: It names the ranks that have not come. `launch.cause` takes the blame from that text.
        """
        keys = [f"here/{other}" for other in range(world_size)]
        self.publish(keys[self.rank])
        if wait_until(lambda: self.store.check(keys), time.monotonic() + timeout_s):
            return
        missing = [str(other) for other, key in enumerate(keys) if not self.is_published(key)]
        if missing:  # Else the last one came at the last moment.
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
            raise RankTimeoutError(
                f"{who} did not come to open the process group within {timeout_s:g} seconds.", hint=hint
            )

    def wait_for_number(self, key: str, number: int, what: str, *, timeout_s: float) -> None:
        """Waits until the value of `key`, a number that grows, has come to `number`. See `wait`."""
        self.wait(lambda: int(self.read(key) or -1) >= number or None, what, timeout_s=timeout_s)

    def wait_for(self, key: str, what: str, *, timeout_s: float) -> str:
        """Waits until `key` is published and returns its value. See `wait`."""
        return self.wait(lambda: self.read(key), what, timeout_s=timeout_s)

    def wait(self, read: Callable[[], _Found | None], what: str, *, timeout_s: float, hint: str = _HINT) -> _Found:
        """Calls `read`, which does not wait, until it returns something else than None. `what` is waited for.

        Raises:
            RankTimeoutError: It was not there within `timeout_s`.
            DistributedError: Rank 0 has left the code that all ranks run without publishing it.
        """
        begin_s = time.monotonic()
        abandoned_s: float | None = None
        while True:
            if abandoned_s is None and self.is_abandoned():
                abandoned_s = time.monotonic()
            if (found := read()) is not None:
                return found
            # `set` does not wait: what was published before may be still on its way.
            if abandoned_s is not None and time.monotonic() - abandoned_s > _IN_FLIGHT_S:
                who = "rank 0 has" if self.rank else "the other ranks have"
                raise DistributedError(
                    f"rank {self.rank} waits for {what}, and {who} left the cell.",
                    hint="Let all ranks take the same way through the cell.",
                )
            waited_s = time.monotonic() - begin_s
            if waited_s > timeout_s:
                raise RankTimeoutError(f"rank {self.rank} waited {timeout_s:g} seconds for {what}.", hint=hint)
            time.sleep(min(max(waited_s / _PAUSES_PER_WAIT, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
