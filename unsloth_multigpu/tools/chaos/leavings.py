"""What a run has written into the user's folder beside what is turned aside: a script may save where it likes."""

from __future__ import annotations

import os
from pathlib import Path

# A folder may be a home with everything in it.
_MOST_ENTRIES = 50_000
# Caches, which are written for every run of a script.
_CACHES = ("__pycache__", "unsloth_compiled_cache")


def written_since(folder: Path, since_ns: int) -> list[str]:
    """Files that were made or changed, relative to the folder, hidden ones and caches left out.

    Args:
        since_ns: On the clock of files, `time.time_ns`.
    """
    found: list[str] = []
    num_entries = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _CACHES)
        num_entries += len(files) + len(folders)
        if num_entries > _MOST_ENTRIES:
            break
        for name in sorted(files):
            path = Path(place, name)
            try:
                is_new = path.lstat().st_mtime_ns >= since_ns
            except FileNotFoundError:
                continue
            if is_new and not name.startswith("."):
                found.append(str(path.relative_to(folder)))
    return found
