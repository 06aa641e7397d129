"""Processes: do they live, who ends them, and has the machine run out of memory? Linux.

psutil tells of processes. What it has no words for is read or called here: a signal to the main thread alone, and how
often the kernel has killed for lack of memory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, ParamSpec

import psutil

from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)

_P = ParamSpec("_P")
_POLL_S, _LOOK_S = 0.01, 0.2
# From SIGKILL until a process is gone; a driver may hold it longer.
KILL_LIMIT_S = 5.0


def threads_of_each(num_processes: int) -> int:
    """Threads that each of some processes may compute with: its part of the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def pid_scope() -> str:
    """A short name of where process ids mean what they mean here: this PID namespace, of this boot of this machine.

    Elsewhere, in a container that shares /tmp or on another host with the same disk, an id is another process's. What a
    machine does not tell is left out. The host's name tells apart machines that were started from one saved memory.
    """
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def only_here(function: Callable[_P, object], otherwise: Callable[_P, object] | None = None) -> Callable[_P, None]:
    """For handlers of atexit and `sys.excepthook`: a forked child inherits them, but is not this process.

    Args:
        function: What this process does.
        otherwise: What its forked children do; None = nothing.
    """
    pid = os.getpid()

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if os.getpid() == pid:
            function(*args, **kwargs)
        elif otherwise is not None:
            otherwise(*args, **kwargs)

    return call


def is_alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    return read_state(pid) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def read_state(pid: int) -> str:
    """One of psutil's `STATUS_...`; `STATUS_DEAD` also for a process that is gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)


def read_begin_ticks(pid: int) -> int | None:
    """When the process began, in ticks of the kernel since the machine did; None where it is gone.

    psutil gives seconds since 1970, which change for a living process when the clock of the machine is set.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in brackets, with any characters. This is the 22nd.
    return int(text.rpartition(")")[2].split()[19])


def read_held_bytes(pid: int) -> int:
    """Memory of the machine that the process holds now; 0 where it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def read_peak_bytes() -> int:
    """Most memory of the machine that this process has held. psutil has no word for it on Linux."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        # Some sandboxes do not tell. This one may begin with what the process had that started this one.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def send_signal(pid: int, signal_number: signal.Signals) -> None:
    """Sends a signal; a process that has ended needs none."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        logger.debug("pid=%d had already ended", pid)


def send_to_main_thread(pid: int, signal_number: signal.Signals) -> None:
    """Sends a signal that no other thread may take: a stopped process then handles it before it continues."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc has it since 2.30.
    if tgkill is None:
        send_signal(pid, signal_number)
    elif tgkill(pid, pid, signal_number) != 0:
        logger.debug("pid=%d had already ended", pid)


def kill_rank(pid: int) -> None:
    """SIGKILL to a rank and what it has started: a rank leads a group of processes, and those may hold its device."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        send_signal(pid, signal.SIGKILL)  # It leads none, or all of it has ended.


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: BinaryIO,
    *,
    marker: str,
    limit_s: float,
    terminate_limit_s: float,
    cwd: Path | None = None,
    look: Callable[[int], None] | None = None,
) -> int | None:
    """Runs a command in a session of its own, which Ctrl-C does not reach, and leaves nothing of it behind.

    Args:
        command: The program and its arguments. It reads nothing.
        environment: All of its variables; one of them must hold `marker`.
        output: Where it prints.
        marker: See `end_command`.
        limit_s: After which it is ended.
        terminate_limit_s: What it then has to end by itself.
        cwd: Its working folder; None = this process's.
        look: Called a few times a second with its process id.

    Returns:
        Its exit code, negative = the signal that ended it; None where it took longer than `limit_s`.
    """
    process = subprocess.Popen(
        list(command),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )
    end_s = time.monotonic() + limit_s
    try:
        while (left_s := end_s - time.monotonic()) > 0:
            if look is not None:
                look(process.pid)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(left_s if look is None else min(_LOOK_S, left_s))
        return process.poll()
    finally:
        end_command(process, marker, terminate_limit_s)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Lets SIGTERM, and SIGHUP where the terminal is closed, end what this process has started, too, by SystemExit.

    What was ignored before stays so, as under nohup. Another thread than the main one gets no signals.
    """
    received: list[int] = []

    def leave(signal_number: int, frame: FrameType | None) -> None:
        # A closed terminal and the shell in it both send SIGHUP. The second one would leave what is being ended.
        if not received:
            received.append(signal_number)
            raise SystemExit(128 + signal_number)

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                before = signal.getsignal(number)
                if before != signal.SIG_IGN:
                    stack.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
                    signal.signal(number, leave)
        yield


def end_command(process: subprocess.Popen[bytes], marker: str, limit_s: float) -> None:
    """Asks a command to end, kills it after `limit_s`, and ends what it leaves behind.

    Args:
        process: Leads a session of its own.
        marker: Text that is in the variables of this command alone. Its group is not enough: launchers give each rank
            a session of its own, and torch elastic forgets those that it was starting when its signal came.
        limit_s: What it has to end by itself, in seconds.
    """
    if process.poll() is None:
        # The launchers end their ranks on SIGTERM.
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    with suppress(ProcessLookupError):  # The usual case: no process is left in the group.
        os.killpg(process.pid, signal.SIGKILL)
    wait_after_kill(process)
    if left := kill_marked(marker):
        logger.warning("pids=%s do not end: a driver may hold them", left)


def wait_after_kill(process: subprocess.Popen[Any]) -> None:
    """Collects a process that was sent SIGKILL; a driver may hold it, and then it is left to init."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_LIMIT_S)


def _has_marker(process: psutil.Process, marker: str) -> bool:
    return any(marker in f"{name}={value}" for name, value in process.environ().items())


def find_marked(marker: str) -> list[int]:
    """Living processes that have inherited a variable with `marker` in it, wherever they are attached by now."""
    found = []
    for pid in psutil.pids():
        # One that has ended meanwhile, or is another user's.
        with suppress(psutil.Error):
            if _has_marker(psutil.Process(pid), marker):
                found.append(pid)
    return found


def kill_marked(marker: str) -> list[int]:
    """SIGKILL to all that `find_marked` finds, and to what those start meanwhile; returns those that did not end."""
    end_s = time.monotonic() + KILL_LIMIT_S
    seen: set[int] = set()
    while True:
        found = find_marked(marker)
        for pid in found:
            send_signal(pid, signal.SIGKILL)
        # Its variables go before its files and devices.
        seen = {pid for pid in seen.union(found) if is_alive(pid)}
        # Until a search finds none: one that has ended since may have started another, after it was looked for.
        if not (found or seen) or time.monotonic() > end_s:
            return sorted(seen)
        time.sleep(_POLL_S)


def count_memory_kills() -> int:
    """Processes that the kernel has killed for lack of memory, in this control group and on the machine, since ever.

    Only a difference tells something; a kill is counted more than once where several counters see it.
    """
    return sum(map(_read_kills, _kill_counters()))


def _kill_counters() -> Iterator[Path]:
    yield Path("/proc/vmstat")
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # Version 2; together with version 1 it is mounted one level deeper, without memory.
            yield Path(f"/sys/fs/cgroup{path}") / "memory.events"
        elif "memory" in controllers.split(","):
            yield Path(f"/sys/fs/cgroup/memory{path}") / "memory.oom_control"


def _read_kills(counter: Path) -> int:
    try:
        lines = counter.read_text().splitlines()
    except OSError:
        return 0  # A container may see its own group under another path.
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
