"""Lets rank 0 write files while the other ranks wait for it. Needs no torch.

The script runs on every rank, including `if exists(folder): rmtree(folder)` before a save. So rank 0 waits a few
seconds before it writes, until the other ranks have come to the same save. This is no barrier: an export may take
longer than the timeout of a collective, and code that only rank 0 reaches must not wait for the others.

In the store, `saves/of/WHAT` describes rank 0's latest save of WHAT (a saver and its path): its number, and {} once it
has begun, later its outcome. `saves/at/R` is the current position of rank R.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.group.outcome import failure, value_of
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.wait import POLL_S, wait_until

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

logger = get_logger(__name__)

# Time that rank 0 waits for the others before it writes. Code that only rank 0 reaches waits that long once.
MEET_LIMIT_S = 5.0
# After this time without a save by rank 0, a folder that rank 0 does not save to belongs to the waiting rank alone.
OWN_PATH_GRACE_S = 10.0
# An export may take hours. If rank 0 dies meanwhile, the launcher ends the run.
SAVE_LIMIT_S = 86_400.0
_AT = "saves/at/{}"
_OF = "saves/of/{}"
_LEFT = "saves/left/{}"
_GATHERS = "Saving a sharded model gathers the weights of all ranks, so all ranks must call it."
_ON_ALL_RANKS = "Call it on all ranks, not under `if rank == 0:`. The files are written once."


class _Place(NamedTuple):
    """The position of a rank, as published to the others.

    Attributes:
        what: The latest saver and its path.
        number: Number of calls of this saver with this path.
        waits: True until the rank leaves the saver.
        num_saves: Number of calls of all savers.
    """

    what: str = ""
    number: int = 0
    waits: bool = False
    num_saves: int = 0


class Saves:
    """This rank's part in the saves of a run."""

    def __init__(self, manager: DDPManager) -> None:
        self._manager = manager
        self._rank = manager.rank
        self._at = _Place()
        self._counts: Counter[str] = Counter()
        self._is_late = False  # On ranks above 0: rank 0 had already started this save.
        # On rank 0: the last save at each call site that not all ranks reached.
        self._lonely: dict[int, _Place] = {}

    @contextmanager
    def visit(self, what: str) -> Iterator[None]:
        """Surrounds a call of a saver on this rank. `what` is the saver and its path, equal on all ranks."""
        self._counts[what] += 1
        self._is_late = self._told(what) is not None
        self._tell(_Place(what, self._counts[what], True, self._at.num_saves + 1))
        try:
            yield
        except BaseException as error:
            if not self._rank:
                self._publish(failure(error))
            raise
        finally:
            self._tell(self._at._replace(waits=False))

    def write(self, path: str, save: Callable[[], Any]) -> Any:
        """Rank 0's part of a save: waits for the others, saves, and publishes the outcome.

        `path` is absolute; "" if the saver chooses it, or uploads.
        """
        self._wait_for_others()
        self._publish({})
        result = save()
        written = path if path and os.path.lexists(path) else ""
        self._publish({"value": _plain(result), "path": written})
        return result

    def follow(self) -> tuple[bool, Any]:
        """Another rank's part of a save: waits until rank 0 has made it. Returns True and rank 0's result.

        A folder may belong to this rank alone, for example from tempfile. That is so if rank 0 has made as many saves
        as this rank, none of them to this folder, and is not in a save. Then (False, None) is returned.

        Raises:
            DistributedError: Rank 0 failed, has left without this save, or the saved files are gone.
            RankTimeoutError: Rank 0 does not come within `timeout_s`.
        """
        what, since_s, before = self._at.what, time.monotonic(), _Place()
        while True:
            # Read first, so that a save which rank 0 made before it left is seen below.
            has_left = self._has_left(0) or self._manager.is_abandoned()
            first = self._place_of(0)
            if first != before:
                since_s, before = time.monotonic(), first
            if outcome := self._told(what):
                return True, self._result(outcome)
            may_come = first.waits or first.num_saves < self._at.num_saves
            if has_left and may_come:
                where = f"in {what}, and rank 0 has left the script or the cell"
                raise DistributedError(f"rank {self._rank} waits for rank 0 {where}.", hint="Save on all ranks.")
            quiet_s = time.monotonic() - since_s
            if has_left or (quiet_s > OWN_PATH_GRACE_S and not may_come):
                logger.warning("%s is called on this rank alone; the last save of rank 0 was %s", what, first.what)
                self._tell(self._at._replace(waits=False))
                return False, None
            limit_s = SAVE_LIMIT_S if first.waits else self._manager.config.timeout_s
            if quiet_s > limit_s:
                raise RankTimeoutError(
                    f"rank {self._rank} waited {limit_s:g} seconds for rank 0 in {what}.",
                    hint="Save on all ranks, or raise timeout_s if it only takes long.",
                )
            time.sleep(POLL_S)

    def meet(self) -> None:
        """Waits in a save of a sharded model until all ranks have come to it.

        Raises:
            DistributedError: Another rank's script or cell has ended without this save.
            RankTimeoutError: Another rank does not come within `timeout_s`.
        """

        def is_here(rank: int) -> bool:
            has_left = self._has_left(rank)  # Read first: a rank may save and then leave.
            if self._place_of(rank)[:2] == self._at[:2]:
                return True
            if has_left:
                what = f"{self._at.what}: rank {rank} ended the script without this save"
                raise DistributedError(f"{what}. {_GATHERS}", hint=_ON_ALL_RANKS)
            return False

        ranks, limit_s = range(self._manager.identity.world_size), self._manager.config.timeout_s
        hint = f"{_GATHERS} {_ON_ALL_RANKS}"
        self._manager.wait_for_all(ranks, is_here, self._at.what, timeout_s=limit_s, hint=hint)

    def leave(self) -> None:
        """Publishes that this rank's script has ended, since others may wait for it."""
        with suppress(RuntimeError):  # The process that serves the store has already ended.
            self._manager.publish(_LEFT.format(self._rank))

    def _wait_for_others(self) -> None:
        """Waits, with a limit, until every other rank waits for this or a later save of rank 0.

        A rank that waits in another save will not come: only rank 0 saves here, or the folder belongs to that rank. If
        not all ranks came in time, the next save at the same call site does not wait, unless they have come since.
        """
        missing = list(range(1, self._manager.identity.world_size))

        def are_there() -> bool:
            missing[:] = [rank for rank in missing if not self._waits(rank) and not self._has_left(rank)]
            return not missing

        # The call site: equal for two calls with the same stack, line by line.
        place = hash(tuple((frame.f_code, line) for frame, line in traceback.walk_stack(None)))
        before = self._lonely.get(place)
        limit_s = min(MEET_LIMIT_S, self._manager.config.timeout_s)
        if not are_there() and before and not any(self._place_of(rank)[:2] == before[:2] for rank in missing):
            limit_s = 0.0
        if wait_until(are_there, time.monotonic() + limit_s):
            self._lonely.pop(place, None)
            return
        self._lonely[place] = self._at
        if limit_s:
            logger.info(
                "%s: rank(s) %s have not come to a save within %g s. Rank 0 goes on, and does not wait again here",
                self._at.what,
                ", ".join(map(str, missing)),
                limit_s,
            )

    def _waits(self, rank: int) -> bool:
        """True if a rank waits for a save that rank 0 has not made yet."""
        at = self._place_of(rank)
        num_made = self._counts[at.what] - (at.what == self._at.what)
        return at.waits and at.number > num_made

    def _has_left(self, rank: int) -> bool:
        return self._manager.is_published(_LEFT.format(rank))

    def _place_of(self, rank: int) -> _Place:
        told = self._manager.read(_AT.format(rank))
        return _Place() if told is None else _Place(*json.loads(told))

    def _tell(self, at: _Place) -> None:
        self._at = at
        self._manager.publish(_AT.format(self._rank), json.dumps(at))

    def _publish(self, outcome: dict[str, Any]) -> None:
        self._manager.publish(_OF.format(self._at.what), json.dumps([self._at.number, outcome]))

    def _told(self, what: str) -> dict[str, Any] | None:
        """Returns the outcome of rank 0's corresponding save: {} while it runs, None if it has not started.

        If rank 0 has started a later save to the same path, the outcome is that of the later one.
        """
        number, outcome = json.loads(self._manager.read(_OF.format(what)) or "[0, null]")
        return outcome if number >= self._counts[what] else None

    def _result(self, outcome: dict[str, Any]) -> Any:
        result = value_of(outcome, self._at.what)
        identity, path = self._manager.identity, outcome["path"]
        is_one_disk = identity.rank == identity.local_rank  # Another node may have another disk.
        if self._is_late and is_one_disk and path and not os.path.lexists(path):
            raise DistributedError(
                f"rank 0 has done {self._at.what}, but {path} is gone. Rank {self._rank} came to this save after rank "
                "0 had stopped waiting for it: the script removed the files on this rank, or later on rank 0.",
                hint="Remove old files on rank 0 alone: if ump.is_main_process().",
            )
        return result


def saved_alone(what: str) -> DistributedError:
    """Returns the error for a save of a sharded model that the other ranks do not call."""
    return DistributedError(f"{what} is called on this rank alone. {_GATHERS}", hint=_ON_ALL_RANKS)


def _plain(result: Any) -> Any:
    """Returns the result as JSON values, which other ranks can be given; None if it is something else."""
    try:
        return json.loads(json.dumps(result))
    except (TypeError, ValueError):
        return None
