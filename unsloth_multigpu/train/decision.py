"""Words in shared memory or the store, by which rank 0 tells the others what its callbacks decided. No collective."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch.distributed import Store

from unsloth_multigpu.errors import DistributedError

# Left by a rank that does not wait for rank 0: it has passed this point, and nothing can be decided there any more.
PASSED = 1 << 8
# Left by rank 0 ahead of all ranks: a rank that comes to this point waits for its word.
WAIT = 1 << 9

_WORD_BYTES = 8
_PAYLOAD_BITS, _INDEX_BITS = 10, 40
# How many points a rank may be ahead of another. Between two collectives there are a few.
_RING = 4096
_FILE = "decisions"
_SHORTEST_PAUSE_S = 0.00002


class Board(Protocol):
    """Two rows of words below `1 << 10`, each in its numbered place.

    Words are written by rank 0 alone. A claim belongs to the rank that comes first.
    """

    # How long a rank that waits sleeps between two reads.
    longest_pause_s: float

    def next_training(self) -> int:
        """Called by rank 0: a number that no training of this run has had, also before a restart."""

    def begin(self, training: int) -> None:
        """Chooses the training. Words of other trainings count as not written."""

    def put(self, index: int, word: int) -> None:
        """Rank 0 writes word `index`."""

    def get(self, index: int) -> int | None:
        """Word `index`, None as long as it is not written."""

    def claim(self, index: int, word: int) -> int:
        """Writes claim `index` unless another rank has. Returns what is there then."""

    def settle(self, index: int, word: int) -> None:
        """Rank 0 replaces its own claim."""

    def look(self, index: int) -> int | None:
        """Claim `index`, None as long as it is not written."""

    def close(self) -> None:
        """Releases what it holds."""


class PageBoard:
    """For the ranks of one machine: memory that they share. A read costs a microsecond, a claim about six.

    Args:
        run_dir: The run's private folder.
    """

    longest_pause_s = 0.001

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        num_bytes = _WORD_BYTES * (1 + 2 * _RING)
        self._file = os.open(Path(run_dir, _FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Reserved now: memory of a full disk that is written later would end the process by SIGBUS.
        os.posix_fallocate(self._file, 0, num_bytes)
        self._memory = memoryview(mmap.mmap(self._file, num_bytes)).cast("q")
        self._training = 0

    def close(self) -> None:
        # The memory goes with the last reference to it.
        os.close(self._file)

    def next_training(self) -> int:
        # 12 bits, and never 0, which a new page is full of. The rings hold nothing of such an old training.
        self._memory[0] = self._memory[0] % ((1 << 12) - 1) + 1
        return self._memory[0]

    def begin(self, training: int) -> None:
        self._training = training

    def put(self, index: int, word: int) -> None:
        self._memory[1 + index % _RING] = self._pack(index, word)

    def get(self, index: int) -> int | None:
        found = self._read(1 + index % _RING)
        if found is not None and found[0] > index:
            raise DistributedError(
                f"rank 0 is {found[0] - index} decisions ahead of this rank.", hint="Report this message."
            )
        return found[1] if found is not None and found[0] == index else None

    def claim(self, index: int, word: int) -> int:
        with self._lock():
            there = self.look(index)
            if there is None:
                self.settle(index, word)
        return word if there is None else there

    def settle(self, index: int, word: int) -> None:
        self._memory[1 + _RING + index % _RING] = self._pack(index, word)

    def look(self, index: int) -> int | None:
        found = self._read(1 + _RING + index % _RING)
        if found is None or found[0] < index:
            return None
        return found[1] if found[0] == index else PASSED  # A rank is a whole ring ahead.

    def _pack(self, index: int, word: int) -> int:
        return (((self._training << _INDEX_BITS) + index) << _PAYLOAD_BITS) + word

    def _read(self, place: int) -> tuple[int, int] | None:
        head, word = divmod(self._memory[place], 1 << _PAYLOAD_BITS)
        training, index = divmod(head, 1 << _INDEX_BITS)
        return (index, word) if training == self._training else None

    @contextmanager
    def _lock(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


class StoreBoard:
    """For ranks of several machines, or of another launcher: their store. A round trip for each word.

    Args:
        store: The ranks' store. Its server does one thing after the other.
    """

    longest_pause_s = 0.005

    def __init__(self, store: Store) -> None:
        self._store = store
        self._prefix = ""

    def close(self) -> None:
        """The store is the ranks' own."""

    def next_training(self) -> int:
        return int(self._store.add("control/trainings", 1))

    def begin(self, training: int) -> None:
        self._prefix = f"control/{training}"

    def put(self, index: int, word: int) -> None:
        self._store.set(self._key("word", index), str(word))
        if index >= _RING:
            self._store.delete_key(self._key("word", index - _RING))

    def get(self, index: int) -> int | None:
        return self._read("word", index)

    def claim(self, index: int, word: int) -> int:
        return int(self._store.compare_set(self._key("claim", index), "", str(word)))

    def settle(self, index: int, word: int) -> None:
        self._store.set(self._key("claim", index), str(word))

    def look(self, index: int) -> int | None:
        return self._read("claim", index)

    def _key(self, name: str, index: int) -> str:
        return f"{self._prefix}/{name}/{index}"

    def _read(self, name: str, index: int) -> int | None:
        key = self._key(name, index)
        return int(self._store.get(key)) if self._store.check([key]) else None


def wait_for_word(read: Callable[[], int | None], longest_pause_s: float, turn: Callable[[], None]) -> int:
    """Reads until there is a word other than `WAIT`. `turn` is called between two reads, and may raise."""
    pause_s = _SHORTEST_PAUSE_S
    while (word := read()) is None or word == WAIT:
        turn()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_pause_s)
    return word
