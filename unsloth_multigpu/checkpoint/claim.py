"""Who writes an unfinished checkpoint: a lock beside its folder and a mark in it. Only files; no torch.

The lock tells other processes that the writer lives; it ends with the writer, however that ends. The mark tells the
writer that the folder is still the one that it began: where locks do not work, or by hand, it may have been removed.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path

from unsloth_multigpu.wire.lock import try_lock

# In the folder while it is written.
MARK = ".unsloth_multigpu_writing"
# Each further try means that another process has just released a lock.
_MOST_TRIES = 10


class Claim:
    """The right to write, finish or remove one unfinished checkpoint, see `take`.

    Args:
        part: The folder of the checkpoint, in the folder of unfinished ones.
        descriptor: Of the lock's file; None = there was none, and no process writes the folder.
    """

    def __init__(self, part: Path, descriptor: int | None) -> None:
        self.part = part
        self._descriptor = descriptor
        self._token: str | None = None

    def mark(self) -> None:
        """Makes the folder, with the mark that `is_lost` looks for."""
        self.part.mkdir(parents=True, exist_ok=True)
        token = uuid.uuid4().hex
        (self.part / MARK).write_text(token, encoding="ascii")
        self._token = token

    def unmark(self) -> None:
        """Removes the mark: all is written."""
        self._token = None
        (self.part / MARK).unlink(missing_ok=True)

    @property
    def is_lost(self) -> bool:
        """True where the folder was removed, emptied or replaced since `mark`, and before `unmark`."""
        if self._token is None:
            return False
        try:
            return (self.part / MARK).read_text(encoding="ascii") != self._token
        except (FileNotFoundError, NotADirectoryError):
            return True

    def forget(self) -> None:
        """In a forked child: the lock ends with its parent, however long the child lives."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """Gives the lock back, and removes its file and the folder around it if nothing else is in there."""
        if self._descriptor is not None:
            lock = lock_of(self.part)
            with suppress(OSError):  # A file that stays does no harm, and no other run's is removed.
                if _is_same(self._descriptor, lock):
                    lock.unlink()
            with suppress(OSError):  # There are no locks.
                # Closing it is not enough: a process that was forked while it was held has it as well.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
        with suppress(OSError):  # Not empty: there are other checkpoints.
            self.part.parent.rmdir()


def take(part: Path, *, is_for_writing: bool) -> Claim | None:
    """Locks an unfinished checkpoint for this process. Without waiting.

    Args:
        part: The folder of the checkpoint, in the folder of unfinished ones.
        is_for_writing: False = to clear what is there. Then no lock is made where there is none: every writer makes it
            before the folder, and a disk that is full must not keep anybody from clearing it.

    Returns:
        None where another process that lives has it. Where the file system has no locks it cannot be known.

    Raises:
        OSError: The lock's file cannot be made or opened.
    """
    lock, num_tries = lock_of(part), 0
    while True:
        num_tries += 1
        try:
            if is_for_writing:
                lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | (os.O_CREAT if is_for_writing else 0), 0o600)
        except FileNotFoundError:
            if not is_for_writing:
                return Claim(part, None)
            if num_tries == _MOST_TRIES:
                raise
            continue  # Who released another checkpoint has removed the folder in between.
        is_kept = False
        try:
            if try_lock(descriptor) == "held":  # Where there are no locks, a save must not fail by that.
                return None
            # Some file systems number a file anew whenever it is looked up: the last try counts.
            is_kept = _is_same(descriptor, lock) or num_tries == _MOST_TRIES
        finally:
            if not is_kept:
                os.close(descriptor)
        if is_kept:
            return Claim(part, descriptor)


def lock_of(part: Path) -> Path:
    """The lock's file of an unfinished checkpoint: beside it, so that it never belongs to it."""
    return part.with_name(f".{part.name}.lock")


def _is_same(descriptor: int, path: Path) -> bool:
    """False where who had the lock has removed its file before it was locked here."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
