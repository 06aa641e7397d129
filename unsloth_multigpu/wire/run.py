"""The folders of a run, a private one for its own files and one for logs, and the list of this user's running jobs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import is_alive, read_state, try_lock, write_private

logger = get_logger(__name__)

State = Literal["running", "stopped", "over"]
_PREFIX = "unsloth_multigpu_"
# In the private folder: the description of the run.
_FILE = "run.json"
# Runs a script that does not call `enable_multi_gpu`.
SCRIPT_MODULE = "unsloth_multigpu.cli.script_runner"


@contextmanager
def private_dir() -> Iterator[Path]:
    """Creates a folder that only this user can read, and removes it at the end. Also removes folders of killed runs.

    Its name has the process id and `pid_scope()`: a supervisor in another container may run although this process does
    not see it.

    Raises:
        LaunchError: The folder for temporary files cannot be written, or is full.
    """
    for old in find_private_dirs():
        pid = old.name.removeprefix(_PREFIX).split("_")[0]
        with suppress(FileNotFoundError):  # Another starting run has removed it.
            if pid.isdigit() and not is_alive(int(pid)) and old.lstat().st_uid == os.getuid():
                shutil.rmtree(old, ignore_errors=True)
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_{pid_scope()}_"))
    except OSError as error:
        raise LaunchError(
            f"The folder for temporary files, {tempfile.gettempdir()!r}, cannot be written: {error.strerror}.",
            hint="Set TMPDIR to another folder.",
        ) from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def find_private_dirs() -> list[Path]:
    """Returns the private folders whose process ids are valid here."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*") if is_from_here(path)]


def is_from_here(run_dir: Path) -> bool:
    """True if the process id in the name of a private folder belongs to this machine and PID namespace."""
    return run_dir.name.removeprefix(_PREFIX).split("_")[1:2] == [pid_scope()]


@contextmanager
def exclusive_log_dir(log_dir: Path, num_ranks: int = 0) -> Iterator[Path]:
    """Creates `log_dir`, readable by this user only. A second job at the same time gets a subfolder of its own.

    An existing folder keeps its mode. Other users may have write access to it, so a link with the name of a log is
    replaced, not followed. Each rank above 0 gets an empty log. Stacks of an earlier run are removed.

    Raises:
        LaunchError: The folder cannot be written.
    """
    try:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(log_dir / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            if try_lock(lock) == "held":
                log_dir = Path(tempfile.mkdtemp(prefix=f"job_{os.getpid()}_", dir=log_dir))
                logger.warning("log_dir is in use by another job or server, which may be ending: logs=%s", log_dir)
            for rank in range(num_ranks):
                (log_dir / f"stack_rank_{rank}.txt").unlink(missing_ok=True)
                if rank > 0:
                    make_log(log_dir / f"rank_{rank}.log")
            yield log_dir.resolve()
        finally:
            os.close(lock)
    except OSError as error:
        if error.filename is None or log_dir.name not in str(error.filename):
            raise
        raise LaunchError(
            f"log_dir={os.path.abspath(log_dir)!r} cannot be written: {error.strerror}.",
            hint="Set log_dir to another folder.",
        ) from None


def make_log(log: Path) -> None:
    """Creates an empty log that only this user can read, in place of an old one."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    os.close(os.open(log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


@dataclass(frozen=True)
class Run:
    """A run on this machine.

    Args:
        pid: Process id of its supervisor; in a notebook, that of the kernel.
        begin_s: When the ranks were started, in seconds since 1970.
        job: Name of the script, or "notebook"; `command` is what the user has typed.
        num_ranks: Ranks on this machine.
        folder: The run's private folder.
    """

    pid: int
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
        return "over" if state == "gone" else state


def write_run(run_dir: Path, job: str, command: str, num_ranks: int, log_dir: Path) -> Run:
    """Writes the description of this run into its private folder. Called by the supervisor."""
    run = Run(os.getpid(), time.time(), job, command, num_ranks, str(log_dir), str(run_dir))
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
    return words[2:] if words[:2] == ["-m", SCRIPT_MODULE] else words


def find_runs() -> list[Run]:
    """Returns this user's runs on this machine or container whose supervisor is alive, the newest first."""
    runs = [read_run(path) for path in find_private_dirs()]
    alive = [run for run in runs if run is not None and run.state() != "over"]
    # A process id may be reused: of two runs with one, the newer is alive.
    newest = {run.pid: run for run in sorted(alive, key=lambda run: run.begin_s)}
    return [*newest.values()][::-1]


def read_run(folder: Path) -> Run | None:
    """Reads the run of a private folder; None if there is none, or if other users can read the folder."""
    try:
        found = folder.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.getuid()
        return Run(**json.loads((folder / _FILE).read_text(encoding="utf-8"))) if is_private else None
    except (OSError, ValueError, TypeError):
        return None  # It is being created or removed.


def pid_scope() -> str:
    """Returns a digest of host and PID namespace. Process ids of another scope are not valid here."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
