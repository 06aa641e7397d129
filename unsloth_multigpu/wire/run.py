"""Lists the running jobs of this user. Each supervisor describes its run in a file of its private folder."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unsloth_multigpu.wire.folder import find_private_dirs, is_from_here
from unsloth_multigpu.wire.process import read_begin_ticks, read_state, write_private

State = Literal["running", "stopped", "over"]
_FILE = "run.json"
_SCRIPT_MODULE = "unsloth_multigpu.cli.script_runner"


@dataclass(frozen=True)
class Run:
    """A run on this machine.

    Args:
        pid: Process id of its supervisor, in a notebook of the kernel.
        pid_begin_ticks: Start time of that process, see `read_begin_ticks`: process ids are reused.
        begin_s: When the ranks were started, in seconds since 1970.
        job: Name of the script, or "notebook"; `command` is what the user has typed.
        num_ranks: Ranks on this machine.
        folder: The run's private folder.
    """

    pid: int
    pid_begin_ticks: int | None
    begin_s: float
    job: str
    command: str
    num_ranks: int
    log_dir: str
    folder: str

    def is_here(self) -> bool:
        """False for a run of another machine or container, whose processes are not visible."""
        return is_from_here(Path(self.folder))

    def state(self) -> State:
        """Returns the state of the supervisor: "stopped" by a signal, "over" if it is gone. Requires `is_here()`."""
        state = read_state(self.pid)
        return "over" if state == "gone" or read_begin_ticks(self.pid) != self.pid_begin_ticks else state


def write_run(run_dir: Path, job: str, command: str, num_ranks: int, log_dir: Path) -> Run:
    """Writes the description of this run into its private folder. Called by the supervisor."""
    pid = os.getpid()
    run = Run(pid, read_begin_ticks(pid), time.time(), job, command, num_ranks, str(log_dir), str(run_dir))
    write_private(run_dir / _FILE, json.dumps(dataclasses.asdict(run)))
    return run


def job_of(command: Sequence[str]) -> str:
    """Returns the name of the script or module in a command of ranks."""
    words = _program(command)
    return words[1] if words[:1] == ["-m"] and len(words) > 1 else os.path.basename((words or ["python"])[0])


def shown_command(command: Sequence[str]) -> str:
    """Returns the command of ranks in the form in which the user has typed it."""
    return shlex.join(["python", *_program(command)])


def _program(command: Sequence[str]) -> list[str]:
    words = list(command)
    words = words[1:] if words[:1] == [sys.executable] else words
    return words[2:] if words[:2] == ["-m", _SCRIPT_MODULE] else words


def find_runs() -> list[Run]:
    """Returns this user's runs on this machine or container whose supervisor is alive, the newest first."""
    runs = [read_run(path) for path in find_private_dirs()]
    alive = [run for run in runs if run is not None and run.state() != "over"]
    return sorted({run.pid: run for run in alive}.values(), key=lambda run: run.begin_s, reverse=True)


def read_run(folder: Path) -> Run | None:
    """Reads the run of a private folder; None if there is none, or if other users can read the folder."""
    try:
        found = folder.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.getuid()
        return Run(**json.loads((folder / _FILE).read_text(encoding="utf-8"))) if is_private else None
    except (OSError, ValueError, TypeError):
        return None  # It is being created or removed.
