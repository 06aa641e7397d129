"""Values that ranks exchange without a collective: keys of the store that they share."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from torch.distributed import Store

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import is_alive
from unsloth_multigpu.wire.wait import wait_until

logger = get_logger(__name__)

_Found = TypeVar("_Found")

# Prefix of each value, because some stores do not distinguish an empty value from a missing one.
_MARK = "="
_NONE = "?"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.02
# Limit of the time from a `set` until other ranks read the value.
_IN_FLIGHT_S = 1.0
# A pause lasts the time waited so far, divided by this number.
_PAUSES_PER_WAIT = 8
_HINT = "Call it on all ranks, or raise timeout_s if it only takes long."


class Board:
    """The store of the ranks. It works without a process group, and in code that only some ranks reach.

    Some keys are published once, with a number if there are several of a kind. In others a new value replaces the old.

    Attributes:
        is_abandoned: Returns True if rank 0 (on rank 0: all other ranks) has left the code that this rank runs, and
            publishes nothing more in it.
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
        """Counts a training, and returns its number. It is equal on ranks that begin the same trainings."""
        self._num_trainings += 1
        return self._num_trainings

    def publish(self, key: str, value: str = "") -> None:
        """Sets the value of `key` for all ranks. Does not wait for the store."""
        self.store.set(key, _MARK + value)

    def read(self, key: str) -> str | None:
        """Returns the value of `key`; None if no rank has published it. One round trip; does not wait for a rank."""
        # `get` would wait, and `check` before it is a second round trip. No value is `_NONE`, so this replaces nothing.
        found = self.store.compare_set(key, _NONE, _NONE).decode()
        return None if found == _NONE else found.removeprefix(_MARK)

    def is_published(self, key: str) -> bool:
        """True once some rank has published `key`. Does not wait."""
        return self.read(key) is not None

    def meet(self, world_size: int, *, timeout_s: float, hint: str) -> None:
        """Waits for the other ranks, in Python, so that signals and other threads are handled meanwhile.

        A process group's own error would name only a missing key of its store. Each rank calls this once per store.
        Further calls do not wait. Raises the errors of `wait_for_all`.
        """
        self.publish(f"here/{self.rank}")
        ranks, what = range(world_size), "open the process group"
        self.wait_for_all(ranks, lambda rank: self.is_published(f"here/{rank}"), what, timeout_s=timeout_s, hint=hint)

    def wait_for_all(
        self, ranks: Iterable[int], is_here: Callable[[int], bool], what: str, *, timeout_s: float, hint: str
    ) -> None:
        """Waits until each rank has come to `what`.

        Raises:
            RankTimeoutError: Some ranks have not come. `launch.cause` reads their numbers from its text.
            DistributedError: See `wait`.
        """
        missing = list(ranks)

        def find() -> bool | None:
            missing[:] = [rank for rank in missing if not is_here(rank)]
            return None if missing else True

        try:
            self.wait(find, f"all ranks to come to {what}", timeout_s=timeout_s, hint=hint)
        except RankTimeoutError:
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise RankTimeoutError(f"{who} did not come to {what} within {timeout_s:g} seconds.", hint=hint) from None

    def wait_for(self, key: str, what: str, *, timeout_s: float) -> str:
        """Waits until `key` is published and returns its value. See `wait`."""
        return self.wait(lambda: self.read(key), what, timeout_s=timeout_s)

    def wait(self, read: Callable[[], _Found | None], what: str, *, timeout_s: float, hint: str = _HINT) -> _Found:
        """Calls `read`, which does not wait, until it returns something. `what` describes it in messages.

        Raises:
            RankTimeoutError: `read` returned None for `timeout_s`.
            DistributedError: Rank 0 has left the code that all ranks run, and `read` still returns None.
        """
        begin_s = time.monotonic()
        abandoned_s: float | None = None
        while True:
            if abandoned_s is None and self.is_abandoned():
                abandoned_s = time.monotonic()
            if (found := read()) is not None:
                return found
            # `set` does not wait, so a value that was published earlier may arrive later.
            if abandoned_s is not None and time.monotonic() - abandoned_s > _IN_FLIGHT_S:
                who = "rank 0 has" if self.rank else "the other ranks have"
                raise DistributedError(
                    f"rank {self.rank} waits for {what}, and {who} left the cell.",
                    hint="Let all ranks run the same code in a cell." if hint == _HINT else hint,
                )
            waited_s = time.monotonic() - begin_s
            if waited_s > timeout_s:
                raise RankTimeoutError(f"rank {self.rank} waited {timeout_s:g} seconds for {what}.", hint=hint)
            time.sleep(min(max(waited_s / _PAUSES_PER_WAIT, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    def come(self) -> None:
        """Tells rank 0, whose process serves the store, that this rank needs it until `leave`."""
        self.publish(f"needs/{self.rank}", json.dumps([platform.node(), os.getpid()]))

    def leave(self, world_size: int, limit_s: float) -> None:
        """Called when this rank no longer needs the store. Rank 0 waits for the others, at most `limit_s`."""
        if self.rank > 0:
            with suppress(RuntimeError):  # Rank 0 has left before.
                self.publish(f"needs/{self.rank}", json.dumps(None))
            return

        def present() -> list[int]:
            told = {rank: self.read(f"needs/{rank}") for rank in range(1, world_size)}
            return [rank for rank, text in told.items() if text is None or _lives(json.loads(text))]

        if not wait_until(lambda: not present(), time.monotonic() + limit_s):
            logger.warning(
                "rank 0 leaves, and with it the store of the ranks; rank(s) %s have not left within %g s (timeout_s)",
                ", ".join(map(str, present())),
                limit_s,
            )


def _lives(process: tuple[str, int] | None) -> bool:
    """False for None, and for a process of this machine that has ended. Those of other machines are assumed to live."""
    return process is not None and (process[0] != platform.node() or is_alive(process[1]))
