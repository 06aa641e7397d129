"""What rank 0 has saved and removed in this run, in order: kept by rank 0, read by the others from its store.

Needs no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any, Protocol

# Absolute path -> inode, time of the last change in ns, size in bytes.
Inventory = dict[str, tuple[int, int, int]]
# In a folder with more files than this, subfolders are not searched.
_MAX_FILES = 10_000
_READ_LIMIT_S = 60.0


class KeyStore(Protocol):
    """The methods of a `DDPManager` for keys that all ranks see."""

    def publish(self, key: str, value: str = "") -> None: ...

    def is_published(self, key: str) -> bool: ...

    def wait_for(self, key: str, what: str, *, timeout_s: float) -> str: ...


@dataclass
class Entry:
    """A save or a removal, published when rank 0 begins it and when it is done.

    Attributes:
        what: The call, equal on all ranks that make it.
        path: The real path of what is saved or removed; "" where no files are written.
        target: Where a removal moves it to.
        is_removal: False for a save.
        outcome: None while it lasts; `error`, or of a save `result`, `files`, and `removed`: what it cleared away.
    """

    what: str
    path: str
    target: str | None = None
    is_removal: bool = False
    outcome: dict[str, Any] | None = None
    files: Inventory = field(default_factory=dict)

    def touches(self, path: str) -> bool:
        """True if one of the two paths contains the other, or if the entry has removed `path`."""
        own = [self.path, *(self.outcome or {}).get("removed", ())]
        return any(is_within(path, mine) or is_within(mine, path) for mine in own if mine)


class Journal:
    """The entries of a run, and which of the files that they have made should be there."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        # Path -> number of the entry that made it last, and what it was then.
        self.files: dict[str, tuple[int, tuple[int, int, int]]] = {}
        self._num_applied = 0

    def begin(self, manager: KeyStore, entry: Entry) -> int:
        """Publishes what rank 0 is about to do; returns its number."""
        self.entries.append(entry)
        number = len(self.entries) - 1
        publish_now(manager, f"saves/{number}", json.dumps([entry.what, entry.path, entry.target, entry.is_removal]))
        return number

    def end(self, manager: KeyStore, number: int, **outcome: Any) -> None:
        """Publishes how it went."""
        self._close(self.entries[number], outcome)
        publish_now(manager, f"saves/{number}/done", json.dumps(outcome))
        self._apply()

    def read(self, manager: KeyStore) -> list[Entry]:
        """All entries that rank 0 has begun by now. Does not wait."""
        while manager.is_published(f"saves/{len(self.entries)}"):
            text = manager.wait_for(f"saves/{len(self.entries)}", "rank 0", timeout_s=_READ_LIMIT_S)
            self.entries.append(Entry(*json.loads(text)))
        for number in range(self._num_applied, len(self.entries)):
            if self.entries[number].outcome is None and manager.is_published(f"saves/{number}/done"):
                self.wait(manager, number, timeout_s=_READ_LIMIT_S)
        self._apply()
        return self.entries

    def wait(self, manager: KeyStore, number: int, *, timeout_s: float) -> dict[str, Any]:
        """Waits until rank 0 has done it, and returns how it went.

        Raises:
            RankTimeoutError: It is not done within `timeout_s`.
        """
        entry = self.entries[number]
        if entry.outcome is None:
            text = manager.wait_for(f"saves/{number}/done", f"rank 0 in {entry.what}", timeout_s=timeout_s)
            self._close(entry, json.loads(text))
        assert entry.outcome is not None
        return entry.outcome

    def saved_in(self, path: str) -> dict[str, tuple[int, tuple[int, int, int]]]:
        """Files that a removal of `path` would take away: path -> number of the save, and what was saved."""
        return {file: fact for file, fact in self.files.items() if is_within(file, path)}

    @staticmethod
    def _close(entry: Entry, outcome: dict[str, Any]) -> None:
        entry.outcome = outcome
        entry.files = {file: tuple(stat) for file, stat in outcome.get("files", {}).items()}

    def _apply(self) -> None:
        """Updates `files` up to the first entry that is not done."""
        while self._num_applied < len(self.entries) and self.entries[self._num_applied].outcome is not None:
            number, entry = self._num_applied, self.entries[self._num_applied]
            self._num_applied += 1
            for path in (entry.outcome or {}).get("removed", ()):
                for file in self.saved_in(path):
                    del self.files[file]
            self.files.update({file: (number, stat) for file, stat in entry.files.items()})
            if not entry.is_removal or "error" in (entry.outcome or {}):
                continue
            for file in self.saved_in(entry.path):
                fact = self.files.pop(file)
                if entry.target is not None:
                    self.files[entry.target + file[len(entry.path) :]] = (number, fact[1])


def publish_now(manager: KeyStore, key: str, value: str = "") -> None:
    """Publishes, and returns when others see it: a store's `set` returns before that, and files are faster."""
    manager.publish(key, value)
    manager.is_published(key)


def is_within(path: str, folder: str) -> bool:
    """True for the folder itself and for all that lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def real_path(path: Any, dir_fd: int | None = None) -> str:
    """The path without links in its folders; of a link itself, not of what it leads to.

    Args:
        path: Text, bytes or a path object.
        dir_fd: An open folder that a relative path begins at.
    """
    text = os.fsdecode(path)
    if dir_fd is not None and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
    folder, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(folder), name)


def take_inventory(path: str) -> Inventory:
    """The files at or below `path`."""
    found: Inventory = {}
    if os.path.isfile(path):
        _note(path, found)
    for folder, _, names in os.walk(path):
        for name in names:
            _note(os.path.join(folder, name), found)
        if len(found) > _MAX_FILES:
            return {file: stat for file, stat in found.items() if os.path.dirname(file) == path}
    return found


def _note(path: str, found: Inventory) -> None:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return  # Just removed, or a link that leads nowhere.
    found[path] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
