"""Parses the stacks of a rank's threads that `faulthandler` writes after a signal."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# IPython's file name of a notebook cell.
_CELL = re.compile(r"^<ipython-input-(\d+)-\w+>$")
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _PACKAGE, "<")
_SITES = ("/site-packages/", "/dist-packages/")


def stack_path(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """Returns the file for a rank's stacks in the run's folder."""
    return Path(run_dir) / f"stack_rank_{rank}.txt"


def main_frames(text: str) -> list[str]:
    """Returns the lines of the main thread's frames, innermost first. faulthandler writes the main thread last."""
    frames: list[str] = []
    is_thread = False
    for line in text.splitlines():
        if _HEADER.match(line):
            is_thread, frames = True, []
        elif is_thread and _FRAME.match(line):
            frames.append(line)
        else:
            is_thread = False
    return frames


def is_written(text: str) -> bool:
    """True once the main thread's stack, the last one, is complete, if that thread has received the signal."""
    return bool(main_frames(text)) and "Current thread 0x" in text


def place_of(frames: list[str]) -> str:
    """Returns the innermost frame of the user's own code, such as "train.py:41 in collate"; "" without one."""
    for line in frames:
        frame = _FRAME.match(line)
        if frame is not None and not _is_library(frame["file"]):
            cell = _CELL.match(frame["file"])
            name = f"In [{cell[1]}]" if cell else Path(frame["file"]).name
            return f"{name}:{frame['line']} in {frame['function']}"
    return ""


def _is_library(file: str) -> bool:
    return (file.startswith(_LIBRARIES) and not _CELL.match(file)) or any(site in file for site in _SITES)
