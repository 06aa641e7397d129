"""The page of a run on one machine: what its supervisor asks of the ranks, and how far each rank is."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WORD_BYTES = 8
# Words of the page: the signal, the point to stop at, the deadline, then two for each rank.
_SIGNAL, _STOP_POINT, _DEADLINE_NS, _FIRST_RANK = range(4)
_FILE = "control"
# `timeout` and job managers signal a process and its group, srun the ranks and so does their launcher: the same signal
# twice within this time is one.
REPEAT_S = 0.2


class ControlPage:
    """A few whole numbers in memory that the supervisor and its ranks share. The machine writes each of them at once.

    Args:
        run_dir: The run's private folder.
        num_ranks: Ranks of this machine; the supervisor makes the page. None = a rank opens it.
    """

    def __init__(self, run_dir: str | os.PathLike[str], num_ranks: int | None = None) -> None:
        path = Path(run_dir, _FILE)
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if num_ranks is None else os.O_CREAT), 0o600)
        if num_ranks is not None:
            # Reserved now: memory of a full disk that is written later would end the process by SIGBUS.
            os.posix_fallocate(self._file, 0, _WORD_BYTES * (_FIRST_RANK + 2 * num_ranks))
        self._words = memoryview(mmap.mmap(self._file, 0)).cast("q")

    def close(self) -> None:
        """Lets go of the file. The memory goes with the last reference to it."""
        os.close(self._file)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process after the other. Taken for microseconds; the system takes it back from a process that dies."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    @property
    def signal(self) -> int:
        """Number of the signal that asks the ranks to stop, 0 = none."""
        return self._words[_SIGNAL]

    @property
    def deadline_s(self) -> float:
        """When the ranks must have stopped, on the clock of `time.monotonic`."""
        return self._words[_DEADLINE_NS] / 1e9

    def ask(self, signal_number: int, deadline_s: float) -> None:
        """Asks the ranks to stop. The first to ask is heard."""
        if not self.signal:
            self._words[_DEADLINE_NS] = int(deadline_s * 1e9)
            self._words[_SIGNAL] = signal_number

    @property
    def stop_point(self) -> int:
        """The first point at which the ranks stop, 0 = not agreed yet. Read and set under the lock."""
        return self._words[_STOP_POINT]

    @stop_point.setter
    def stop_point(self, point: int) -> None:
        self._words[_STOP_POINT] = point

    def points(self) -> list[int]:
        """The last point of each rank of this machine."""
        return self._words[_FIRST_RANK::2].tolist()

    def set_point(self, local_rank: int, point: int) -> None:
        """Says that a rank has come to `point`. Under the lock."""
        self._words[_FIRST_RANK + 2 * local_rank] = point

    def left(self) -> list[int]:
        """Process ids of the ranks that have done their part of a stop, 0 for others."""
        return self._words[_FIRST_RANK + 1 :: 2].tolist()

    def set_left(self, local_rank: int, pid: int) -> None:
        """Says that a rank has done its part of a stop."""
        self._words[_FIRST_RANK + 1 + 2 * local_rank] = pid

    def reset(self) -> None:
        """Forgets all: the ranks are about to be started again."""
        for i in range(len(self._words)):
            self._words[i] = 0
