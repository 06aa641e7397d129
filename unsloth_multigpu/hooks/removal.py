"""Only rank 0 removes the files that it has saved; the other ranks do not.

The script runs on every rank, and so does `if exists(folder): rmtree(folder)` before a save. A rank that comes there
late would remove what rank 0 has saved since. In program order its removal belongs before that save, where rank 0 has
made the same call: it is left out. A removal of something that both have seen saved waits for rank 0's.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.checkpoint.manifest import PART_FOLDER
from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.hooks.journal import Entry, is_within, publish_now, real_path
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.patching import Patch

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager
    from unsloth_multigpu.hooks.saving import SaveGate

logger = get_logger(__name__)

_POLL_S = 0.02
# How often a removal is retried while another rank removes the same file.
_MAX_TRIES = 100
_RETRY_S = 0.02
_LEFT_OUT = object()
_REASON = "A rank that comes late would remove what rank 0 has saved meanwhile; two at once fail at each other's files."
_REMOVALS = ("os:remove", "os:unlink", "os:rmdir", "shutil:rmtree")
_MOVES = ("os:rename", "os:replace", "shutil:move")
# Python 3.10's pathlib keeps the functions of `os` as they were when it was imported.
_PATH_REMOVALS = ("pathlib:Path.unlink", "pathlib:Path.rmdir")
_PATH_MOVES = ("pathlib:Path.rename", "pathlib:Path.replace")


def removal_patches(gate: SaveGate) -> list[Patch]:
    """Patches of what removes, moves and replaces files in Python. `gate` knows what was saved."""
    guard = RemovalGuard(gate)
    targets = dict.fromkeys((*_REMOVALS, *_PATH_REMOVALS), False) | dict.fromkeys((*_MOVES, *_PATH_MOVES), True)
    patches = [
        Patch(
            target=target,
            supports="python>=3.10",
            wrap=functools.partial(guard.as_one, moves=moves),
            reason=_REASON,
        )
        for target, moves in targets.items()
    ]
    patches += [
        Patch(
            target=target,
            supports="transformers>=4.57,<6",
            wrap=_of_whole_ones,
            reason="It counts unfinished checkpoints, also those of another run, and would remove them or this run's.",
            needs=("output_dir",),
            optional=True,  # One of the two is there.
        )
        for target in ("transformers.trainer:rotate_checkpoints", "transformers.trainer:Trainer._rotate_checkpoints")
    ]
    return patches


def _of_whole_ones(original: Callable[..., None]) -> Callable[..., None]:
    """`rotate_checkpoints`: `Checkpoints` removes older ones itself, when the new one is whole and has its name."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rotate(*args: Any, **kwargs: Any) -> None:
        folder = signature.bind(*args, **kwargs).arguments.get("output_dir")
        if os.path.basename(os.fspath(folder or "")) != PART_FOLDER:
            original(*args, **kwargs)

    return rotate


class RemovalGuard:
    """Lets ranks remove as one process would: rank 0 what it has saved, and no rank fails at another's removal."""

    def __init__(self, gate: SaveGate) -> None:
        self._gate = gate
        self._pid = os.getpid()
        self._thread = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (type(self).__name__,)  # See `SaveGate`.

    def as_one(self, original: Callable[..., Any], *, moves: bool) -> Callable[..., Any]:
        """Wraps a function `(path, ...)` that removes `path`, or `(path, target, ...)` that moves it."""

        @functools.wraps(original)
        def removing(*args: Any, **kwargs: Any) -> Any:
            # A program's own helper processes are not ranks. Calls of these functions inside one another are one call.
            if os.getpid() != self._pid or getattr(self._thread, "is_inside", False):
                return original(*args, **kwargs)
            self._thread.is_inside = True
            try:
                manager = self._gate.find_manager()
                if manager is None:
                    return original(*args, **kwargs)
                act = functools.partial(original, *args, **kwargs)
                path, target = _paths(args, kwargs, moves=moves)
                if self._gate.rank == 0 and self._gate.is_saving:
                    # Savers remove what they replace. The journal has an entry of the saver itself.
                    self._gate.removed += [path] if self._gate.journal.saved_in(path) else []
                    return act()
                result = self._remove(manager, original.__name__, path, target, act)
                if result is not _LEFT_OUT:
                    return result
                # The functions of `os` return nothing, the others where it lies now.
                of_path = original.__qualname__.startswith("Path.")
                return type(args[0])(target) if of_path and moves else target if original.__name__ == "move" else None
            finally:
                self._thread.is_inside = False

        return removing

    def _remove(self, manager: DDPManager, name: str, path: str, target: str | None, act: Callable[[], Any]) -> Any:
        """Removes or moves `path`, unless that is up to rank 0 and rank 0 does it."""
        what = f"{name}({', '.join(repr(p) for p in (path, target) if p is not None)})"
        if self._gate.rank > 0:
            return self._remove_above_rank_0(manager, name, what, path, target, act)
        if self._gate.journal.saved_in(path):
            entry = Entry(what, path, _end_of_move(name, path, target), is_removal=True)
            act = functools.partial(self._gate.note, manager, entry, act)
        return self._together(manager, name, path, target, act)

    def _remove_above_rank_0(
        self, manager: DDPManager, name: str, what: str, path: str, target: str | None, act: Callable[[], Any]
    ) -> Any:
        from torch.distributed import DistError

        gate = self._gate
        try:
            if self._is_left_to_rank_0(manager, what, path):
                return _LEFT_OUT
            if target is not None and max(gate.saved_by_rank_0(manager, target), default=-1) > gate.position:
                # In program order the save comes later and replaces it.
                logger.info("%s: rank 0 has saved there since", what)
                os.unlink(path)
                return _LEFT_OUT
            return self._together(manager, name, path, target, act)
        except DistError:
            # Rank 0 served the store and has ended, as under srun. Only its files can still be harmed.
            if gate.journal.saved_in(path):
                raise
            return act()

    def _together(self, manager: DDPManager, name: str, path: str, target: str | None, act: Callable[[], Any]) -> Any:
        """Does it; where another rank is just removing the same folder, or has moved the same file, its work counts.

        Not so for a single file: programs tell by an error of `os.remove` which of them was first.
        """
        if name not in ("rmtree", "move", "rename", "replace"):
            return act()
        key = _claim(manager, f"{path}\0{target or ''}")
        if os.path.lexists(path):
            publish_now(manager, f"{key}/{self._gate.rank}")
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                return act()
            except OSError:
                if not self._is_done_by_another(manager, key):
                    raise
                if not os.path.lexists(path) or (self._gate.rank and self._gate.saved_by_rank_0(manager, path)):
                    return _LEFT_OUT
                if name != "rmtree" or not tries_left:
                    raise
                time.sleep(_RETRY_S)
        raise AssertionError("unreachable")

    def _is_done_by_another(self, manager: DDPManager, key: str) -> bool:
        identity = manager.identity
        first = identity.rank - identity.local_rank
        others = [rank for rank in range(first, first + identity.local_world_size) if rank != identity.rank]
        return any(manager.is_published(f"{key}/{rank}") for rank in others)

    def _is_left_to_rank_0(self, manager: DDPManager, what: str, path: str) -> bool:
        """True once rank 0 has made this call, or is past it; False where rank 0 does not make it, or failed in it.

        Raises:
            DistributedError: Rank 0 has ended and keeps what it saved, or does not come here within `timeout_s`.
        """
        gate, limit_s = self._gate, manager.config.timeout_s
        deadline = time.monotonic() + limit_s
        has_left = False
        while True:
            numbers = gate.saved_by_rank_0(manager, path)
            place = _place_of(gate.journal.entries, gate.position + 1, what, path)
            if place is not None:
                gate.position = place
                return "error" not in gate.journal.wait(manager, place, timeout_s=limit_s)
            if not numbers or not os.path.lexists(path):
                return False
            if len(gate.journal.entries) > gate.position + 1:
                logger.info("%s: left out, rank 0 has saved since", what)
                return True
            if has_left or time.monotonic() > deadline:
                # Not a RankTimeoutError: that would count as the consequence of another rank's failure.
                reason = "has ended its part" if has_left else f"has not come to this call in timeout_s={limit_s:g} s"
                raise DistributedError(
                    f"rank {gate.rank} would remove what rank 0 saved: {what}, and rank 0 {reason}.",
                    hint="Remove it on all ranks, or on rank 0 alone: if ump.get_multi_gpu_status().rank == 0.",
                )
            has_left = manager.is_abandoned() or manager.is_published("saves/end")
            if not has_left:  # Look once more: it may have done that just before it left.
                time.sleep(_POLL_S)


def _place_of(entries: Sequence[Entry], begin: int, what: str, path: str) -> int | None:
    """Number of rank 0's same removal, from `begin` on; None where it saved there before that, or is not so far."""
    for number, entry in enumerate(entries[begin:], start=begin):
        if entry.is_removal and entry.what == what:
            return number
        if not entry.is_removal and entry.path and entry.touches(path):
            return None
    return None


def _paths(args: tuple[Any, ...], kwargs: dict[str, Any], *, moves: bool) -> tuple[str, str | None]:
    """What is removed or moved, and where it is moved to."""
    given = [*args, *(kwargs[n] for n in ("path", "src") if n in kwargs)][:1]
    path = real_path(given[0], kwargs.get("dir_fd", kwargs.get("src_dir_fd")))
    if not moves:
        return path, None
    targets = [*args[1:], *(kwargs[n] for n in ("dst", "target") if n in kwargs)]
    return path, real_path(targets[0], kwargs.get("dst_dir_fd"))


def _end_of_move(name: str, path: str, target: str | None) -> str | None:
    """Where it lies afterwards: `shutil.move` moves into a folder that is there."""
    if target is not None and name == "move" and os.path.isdir(target) and not is_within(target, path):
        return os.path.join(target, os.path.basename(path))
    return target


def _claim(manager: DDPManager, paths: str) -> str:
    """Nodes may have a file of the same name each."""
    node = manager.identity.rank - manager.identity.local_rank
    return f"removed/{node}/{hashlib.blake2b(os.fsencode(paths), digest_size=12).hexdigest()}"
