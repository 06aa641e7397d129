"""The folders of a run: a private one for its own files, and the one for logs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.lock import try_lock
from unsloth_multigpu.wire.process import is_alive, pid_scope

logger = get_logger(__name__)

_PREFIX = "unsloth_multigpu_"
# What events, beats and stacks of a run need at least.
_SPACE_BYTES = 2**18


@contextmanager
def private_dir() -> Iterator[Path]:
    """A folder that only this user can read, removed at the end; those of killed supervisors are swept first.

    Its name has the process id and where that id means something. Only the folders of the same place are swept: the
    supervisor of another one may live where this process cannot see it. A lock on the folder would not tell that
    either: network disks may keep locks on each host alone, and a forked child would hold it.

    Raises:
        LaunchError: The folder for temporary files cannot be written, or is full.
    """
    for old in find_private_dirs():
        pid = old.name.removeprefix(_PREFIX).split("_")[0]
        if pid.isdigit() and not is_alive(int(pid)) and _is_mine(old):
            shutil.rmtree(old, ignore_errors=True)
    try:
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_{pid_scope()}_"))
        _check_space(path)
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
    """The private folders whose process ids mean something here."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*") if is_from_here(path)]


def is_from_here(run_dir: Path) -> bool:
    """True for the private folder of a process that this one would see if it lived."""
    return run_dir.name.removeprefix(_PREFIX).split("_")[1:2] == [pid_scope()]


@contextmanager
def exclusive_log_dir(log_dir: Path, num_ranks: int) -> Iterator[Path]:
    """Makes `log_dir` with empty logs, readable by this user only; a second job at once gets a folder of its own.

    Args:
        log_dir: Where the logs go.
        num_ranks: Ranks above 0 get a log.

    Raises:
        LaunchError: It cannot be written.
    """
    with locked_log_dir(log_dir) as folder:
        (folder / "stack_rank_0.txt").unlink(missing_ok=True)
        for rank in range(1, num_ranks):
            make_log(folder / f"rank_{rank}.log")
            # Of an earlier run; it would be taken for this one's.
            (folder / f"stack_rank_{rank}.txt").unlink(missing_ok=True)
        yield folder


@contextmanager
def locked_log_dir(log_dir: Path) -> Iterator[Path]:
    """Makes `log_dir`, readable by this user only; a second job at once gets a folder of its own in it.

    A folder that was there keeps its mode. Others may be allowed to write in it: a link that they have put in a log's
    place is replaced and not followed.

    Raises:
        LaunchError: It cannot be written.
    """
    try:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(log_dir / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            outcome = try_lock(lock)
            if outcome == "no locks":
                logger.warning(
                    "log_dir is on a file system without locks: a second job there writes over its logs, logs=%s",
                    log_dir,
                )
            elif outcome == "held":
                log_dir = Path(tempfile.mkdtemp(prefix=f"job_{os.getpid()}_", dir=log_dir))
                logger.warning("log_dir is in use by another job or server, logs=%s", log_dir)
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


def _check_space(run_dir: Path) -> None:
    """Where it is missing, the ranks would fail one after the other, with errors that name no file."""
    probe = run_dir / "space"
    try:
        probe.write_bytes(bytes(_SPACE_BYTES))
        probe.unlink()
    except OSError:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise


def make_log(log: Path) -> None:
    """Puts an empty log, readable by this user only, where one may be already."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    os.close(os.open(log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # Another job that starts now has swept it.
        return False
