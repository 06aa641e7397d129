"""The lock of an incomplete checkpoint: its holder writes, finishes or removes the folder. Only files; no torch.

The lock ends with its process, however that ends, so that what a killed run leaves can be told from what a living one
writes.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from unsloth_multigpu.wire.process import try_lock


class Claim:
    """A lock that this process holds, see `take`.

    Args:
        part: The incomplete checkpoint.
        descriptor: Of the lock's file.
    """

    def __init__(self, part: Path, descriptor: int) -> None:
        self.part = part
        self._descriptor = descriptor

    def forget(self) -> None:
        """In a forked child: the lock ends with its parent, however long the child lives."""
        os.close(self._descriptor)

    def release(self) -> None:
        """Gives the lock back, and removes its file, and the folder around it if nothing else is in there."""
        with suppress(OSError):
            if os.fstat(self._descriptor).st_nlink:  # Else another process has made a new one.
                lock_of(self.part).unlink()
        with suppress(OSError):  # Closing is not enough: a child that was forked meanwhile holds it, too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        with suppress(OSError):  # Not empty: there are other checkpoints.
            self.part.parent.rmdir()


def take(part: Path) -> Claim | None:
    """Locks an incomplete checkpoint, without waiting.

    Args:
        part: Folder of the checkpoint, which need not exist yet.

    Returns:
        None where another living process holds the lock, which no process does on a file system without locks.

    Raises:
        OSError: The lock's file cannot be made or opened.
    """
    while True:
        part.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # Another process has just removed the folder.
            descriptor = os.open(lock_of(part), os.O_RDWR | os.O_CREAT, 0o600)
            if try_lock(descriptor) == "held":
                os.close(descriptor)
                return None
            if os.fstat(descriptor).st_nlink:
                return Claim(part, descriptor)
            os.close(descriptor)  # Who held the lock has just removed its file.


def lock_of(part: Path) -> Path:
    """The lock's file: beside the checkpoint, so that it never belongs to it."""
    return part.with_name(f".{part.name}.lock")
