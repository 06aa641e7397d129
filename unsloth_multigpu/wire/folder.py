"""The folders of a run: a private one for its own files, and the one for logs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import is_alive, pid_scope, try_lock

logger = get_logger(__name__)

_PREFIX = "unsloth_multigpu_"


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
