"""Starts, ends and inspects processes. Linux."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Literal, ParamSpec

import psutil

from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)

_P = ParamSpec("_P")
_POLL_S = 0.01
# Limit from SIGKILL until a process is gone. A driver may hold it longer.
KILL_LIMIT_S = 5.0
# Errors of file systems without flock, such as some network file systems and mounted object stores.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def threads_of_each(num_processes: int) -> int:
    """Returns the number of CPU threads per process: an equal share of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def pid_scope() -> str:
    """Returns a digest of host and PID namespace. Process ids of another scope are not valid here."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


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


def read_begin_ticks(pid: int) -> int | None:
    """Returns the start of a process in kernel ticks since boot; None if it is gone. Not affected by the clock."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2 is the program's name in brackets and may contain spaces. The start time is field 22.
    return int(text.rpartition(")")[2].split()[19])


def read_peak_bytes() -> int:
    """Returns the peak resident memory of this process."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return int(psutil.Process().memory_info().rss)  # Some sandboxes do not report the peak.


def count_memory_kills() -> int:
    """Returns the number of processes that the kernel has killed for lack of memory since boot."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def send_signal(pid: int, signal_number: signal.Signals) -> None:
    """Sends a signal. A process that has already ended is not an error."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def send_to_main_thread(pid: int, signal_number: signal.Signals) -> None:
    """Sends a signal to the main thread. A stopped process handles it before it continues."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # In glibc since 2.30.
    if tgkill is None:
        send_signal(pid, signal_number)
    else:
        tgkill(pid, pid, signal_number)


def kill_rank(pid: int) -> None:
    """Kills a rank and its process group, because children of a rank may hold its device."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        send_signal(pid, signal.SIGKILL)  # It does not lead a group.


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: BinaryIO,
    *,
    marker: str,
    limit_s: float,
    terminate_limit_s: float,
    cwd: Path | None = None,
) -> int | None:
    """Runs a command in a new session, without input, which Ctrl-C does not reach, and ends all of its processes.

    Args:
        environment: All of its variables; one of them must contain `marker`, see `end_command`.
        terminate_limit_s: Time between SIGTERM and SIGKILL after `limit_s`.

    Returns:
        The exit code, -N = ended by signal N; None if it took longer than `limit_s`.
    """
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(list(command), cwd=cwd, env=dict(environment), start_new_session=True, **streams)
    try:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(limit_s)
        return process.poll()
    finally:
        end_command(process, marker, terminate_limit_s)


@contextmanager
def signals_handled(
    signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Handles signals within the context. Those that are ignored stay so, as under nohup. In the main thread alone."""
    with ExitStack() as stack:
        for number in signals if threading.current_thread() is threading.main_thread() else ():
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:
                stack.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
                signal.signal(number, handler)
        yield


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit, so that `finally` blocks run."""
    received: list[int] = []

    def leave(signal_number: int, frame: FrameType | None) -> None:
        # A closed terminal and its shell both send SIGHUP: the second one must not interrupt the clean-up.
        if not received:
            received.append(signal_number)
            raise SystemExit(128 + signal_number)

    with signals_handled((signal.SIGTERM, signal.SIGHUP), leave):
        yield


def end_command(process: subprocess.Popen[bytes], marker: str, limit_s: float) -> None:
    """Ends a command, the leader of its session, by SIGTERM, after `limit_s` by SIGKILL, then all that it has left.

    These are found by `marker`, a text that only the environment of this command contains: launchers give each rank a
    session of its own.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    with suppress(ProcessLookupError):  # Usually no process is left in the group.
        os.killpg(process.pid, signal.SIGKILL)
    wait_after_kill(process)
    if left := kill_marked(marker):
        logger.warning("pids=%s do not end: a driver may hold them", left)


def wait_after_kill(process: subprocess.Popen[Any]) -> None:
    """Collects a process after SIGKILL. One that a driver holds is left to init."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_LIMIT_S)


def find_marked(marker: str) -> list[int]:
    """Returns the ids of all processes with `marker` in one of their environment variables."""
    found = []
    for process in psutil.process_iter():
        # It may have ended meanwhile, or belong to another user.
        with suppress(psutil.Error):
            if any(marker in f"{name}={value}" for name, value in process.environ().items()):
                found.append(process.pid)
    return found


def kill_marked(marker: str) -> list[int]:
    """Kills the processes of `find_marked` until there are none. Returns those that did not end in time."""
    end_s = time.monotonic() + KILL_LIMIT_S
    seen: set[int] = set()
    while True:
        found = find_marked(marker)
        for pid in found:
            send_signal(pid, signal.SIGKILL)
        # An ending process loses its environment before its files and devices.
        seen = {pid for pid in seen.union(found) if is_alive(pid)}
        if not (found or seen) or time.monotonic() > end_s:
            return sorted(seen)
        time.sleep(_POLL_S)


def open_private(path: str, flags: int) -> int:
    """An opener of files for this user only. Others may have write access to the folder: no link is followed."""
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
        OSError: The file system fails.
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
