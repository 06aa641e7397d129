"""The lock of an incomplete checkpoint: its holder writes, finishes or removes the folder. Only files; no torch.

The lock ends with its process, however that ends, so that what a killed run leaves can be told from what a living one
writes.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from unsloth_multigpu.wire.lock import try_lock

# Each further try means that another process has just released the lock and removed its file.
_MAX_TRIES = 10


class Claim:
    """A lock that this process holds, see `take`.

    Args:
        part: The incomplete checkpoint.
        descriptor: Of the lock's file.
    """

    def __init__(self, part: Path, descriptor: int) -> None:
        self.part = part
        self._descriptor: int | None = descriptor

    def forget(self) -> None:
        """In a forked child: the lock ends with its parent, however long the child lives."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """Gives the lock back, and removes its file, and the folder around it if nothing else is in there."""
        if self._descriptor is not None:
            lock = lock_of(self.part)
            with suppress(OSError):
                if _is_same(self._descriptor, lock):
                    lock.unlink()
            with suppress(OSError):  # Closing is not enough: a child that was forked meanwhile holds it, too.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()
        with suppress(OSError):  # Not empty: there are other checkpoints.
            self.part.parent.rmdir()


def take(part: Path) -> Claim | None:
    """Locks an incomplete checkpoint, without waiting.

    Args:
        part: Folder of the checkpoint, which need not exist yet.

    Returns:
        None where another living process holds the lock. A file system without locks has no such process.

    Raises:
        OSError: The lock's file cannot be made or opened.
    """
    lock = lock_of(part)
    for number in range(1, _MAX_TRIES + 1):
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # The folder was removed in between.
            if number == _MAX_TRIES:
                raise
            continue
        if try_lock(descriptor) == "held":
            os.close(descriptor)
            return None
        # Some file systems give a file a new number each time it is looked up: the last try counts.
        if _is_same(descriptor, lock) or number == _MAX_TRIES:
            return Claim(part, descriptor)
        os.close(descriptor)
    raise AssertionError


def lock_of(part: Path) -> Path:
    """The lock's file: beside the checkpoint, so that it never belongs to it."""
    return part.with_name(f".{part.name}.lock")


def _is_same(descriptor: int, path: Path) -> bool:
    """False where the file was removed before it was locked here."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
