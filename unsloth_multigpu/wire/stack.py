"""The stacks of a rank's threads, which `faulthandler` writes after SIGUSR2."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path

from unsloth_multigpu.wire.event import stack_path
from unsloth_multigpu.wire.process import send_signal
from unsloth_multigpu.wire.wait import wait_until

_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# IPython's file name of a notebook cell.
_CELL = re.compile(r"^<ipython-input-(\d+)-\w+>$")
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _PACKAGE, "<")
_SITES = ("/site-packages/", "/dist-packages/")


def read_stacks(run_dir: str | os.PathLike[str], pids: Mapping[int, int], limit_s: float) -> dict[int, str]:
    """Returns the stacks of all threads of each rank; "" for a rank that writes none within `limit_s`.

    `pids` are the process ids of the ranks. A stopped process writes nothing.
    """
    # Only if faulthandler is set up: without it the signal would end the process.
    paths = {rank: path for rank in pids if (path := stack_path(run_dir, rank)).exists()}
    begins = {rank: path.stat().st_size for rank, path in paths.items()}
    texts = dict.fromkeys(pids, "")
    for rank in paths:
        send_signal(pids[rank], signal.SIGUSR2)

    def are_complete() -> bool:
        before = dict(texts)
        texts.update({r: path.read_bytes()[begins[r] :].decode(errors="replace") for r, path in paths.items()})
        # The main thread, whose stack is the last one, usually receives the signal.
        return texts == before and all(main_frames(texts[r]) and "Current thread 0x" in texts[r] for r in paths)

    wait_until(are_complete, time.monotonic() + limit_s)
    return texts


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


def place_of(frames: list[str]) -> str:
    """Returns the innermost frame of the user's own code, such as "train.py:41 in collate"; "" without one."""
    for frame in filter(None, map(_FRAME.match, frames)):
        file = frame["file"]
        cell = _CELL.match(file)
        if (cell or not file.startswith(_LIBRARIES)) and not any(site in file for site in _SITES):
            name = f"In [{cell[1]}]" if cell else Path(file).name
            return f"{name}:{frame['line']} in {frame['function']}"
    return ""
