"""Signals, states and files of processes. Linux."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, ParamSpec

import psutil

_P = ParamSpec("_P")
# Errors of file systems without flock, such as some network file systems and mounted object stores.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def threads_of_each(num_processes: int) -> int:
    """Returns the number of CPU threads per process: an equal share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def only_here(function: Callable[_P, object], otherwise: Callable[_P, object] | None = None) -> Callable[_P, None]:
    """Wraps a handler of atexit or `sys.excepthook`, which forked children inherit, to run in this process only.

    Forked children call `otherwise`; None = nothing.
    """
    pid = os.getpid()

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        chosen = function if os.getpid() == pid else otherwise
        if chosen is not None:
            chosen(*args, **kwargs)

    return call


def set_variables(values: Mapping[str, str | None]) -> None:
    """Sets environment variables; None = not set."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    return read_state(pid) != "gone"


def read_state(pid: int) -> Literal["running", "stopped", "gone"]:
    """Returns the state of a process: "stopped" by a signal; "gone" for a zombie, too."""
    try:
        status = psutil.Process(pid).status()
    except (psutil.NoSuchProcess, ValueError):  # A page before its rank has -1.
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def read_peak_bytes() -> int:
    """Returns the peak resident memory of this process."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return int(psutil.Process().memory_info().rss)  # Some sandboxes do not report the peak.


def send_signal(pid: int, signal_number: signal.Signals) -> None:
    """Sends a signal. A process that has already ended is not an error."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


@contextmanager
def signals_handled(
    signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Handles signals within the context, except ignored ones (as under nohup). No effect outside the main thread."""
    with ExitStack() as stack:
        for number in signals if threading.current_thread() is threading.main_thread() else ():
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:
                stack.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
                signal.signal(number, handler)
        yield


def open_private(path: str, flags: int) -> int:
    """Opener for files of this user only. Follows no link, because others may have write access to the folder."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only this user can read, complete or not at all. A link with its name is replaced."""
    part = path.with_name(f".{path.name}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def try_lock(descriptor: int) -> Literal["locked", "held", "no locks"]:
    """Locks an open file exclusively until this process ends, without waiting. "held" = another process has it.

    Raises:
        OSError: The file system reports another error.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # Some network file systems answer with the latter.
        return "held"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return "no locks"
    return "locked"
