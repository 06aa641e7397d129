"""Child processes: Python with a connection to this process, and commands that are ended with all that they start."""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import is_alive, open_private, send_signal, signals_handled
from unsloth_multigpu.wire.run import make_log
from unsloth_multigpu.words import how_ended

logger = get_logger(__name__)

_POLL_S = 0.01
# Limit from SIGKILL until a process is gone. A driver may hold it longer.
KILL_LIMIT_S = 5.0
# The last lines of a log are read from this many bytes at its end.
_TAIL_BYTES = 65536
# Starts Python by way of a shell. A debugger that is attached to this process would patch a Python child, which would
# then wait for a client that VS Code and JupyterLab never connect.
_BY_SHELL = ("/bin/sh", "-c", 'exec "$0" "$@"')


class Child:
    """A Python child process with which this process communicates over a socket pair.

    Args:
        name: Its name in messages, such as "rank 1".
        program: Code for `python -c`. Not `-m`, because its `__main__` belongs to the user. `sys.argv[1]` is the file
            descriptor of its end of the socket pair.
        arguments: The rest of its `sys.argv`.
        log: File for its output.
        environment: All of its variables.

    Attributes:
        connection: This process's end of the socket pair.
        exit_code: None while it lives; -N = ended by signal N.
    """

    def __init__(
        self, name: str, program: str, log: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.log = log
        self.exit_code: int | None = None
        self._killed_because = ""
        self._started_by = os.getpid()
        self.connection, theirs = multiprocessing.Pipe()
        with ExitStack() as stack:
            stack.callback(self.connection.close)
            if not log.exists():  # The folder was removed meanwhile.
                make_log(log)
            with theirs:
                command = [*_BY_SHELL, sys.executable, "-u", "-c", program, str(theirs.fileno()), *arguments]
                self._process = start_process(command, environment, log, pass_fds=[theirs.fileno()])
            self.pid = self._process.pid
            stack.callback(self._process.wait)
            stack.callback(self.kill)
            self.pid_descriptor = os.pidfd_open(self.pid)
            stack.pop_all()

    def kill(self, because: str = "") -> None:
        """Kills the process and its process group. `because` is the reason that the user sees."""
        self._killed_because = self._killed_because or because
        kill_rank(self.pid)

    def has_ended(self, limit_s: float = 0.0) -> bool:
        """Waits for the end of the process; returns False if it has not ended within `limit_s`."""
        return bool(multiprocessing.connection.wait([self.pid_descriptor], limit_s))

    def collect(self) -> None:
        """Collects the exit code of a process that has ended, and kills what is left of its process group."""
        # Kill first: once it is collected, another process may get its id.
        kill_rank(self.pid)
        wait_after_kill(self._process)
        self.exit_code = -signal.SIGKILL if self._process.returncode is None else self._process.returncode

    def is_mine(self) -> bool:
        """True in the process that has started it, False in a forked child."""
        return os.getpid() == self._started_by

    def close(self) -> None:
        """Closes the descriptors, and before that ends the process if it lives and is this process's own."""
        if self.exit_code is None and self.is_mine():
            self.collect()
        self.connection.close()
        os.close(self.pid_descriptor)

    def describe_death(self) -> str:
        """Describes the end of the process, with the last lines of its log."""
        return f"{self.describe_end()}. The end of its log:\n{read_tail(self.log)}"

    def describe_end(self) -> str:
        """Describes the end of the process in one line without a full stop."""
        how = "has not ended" if self.exit_code is None else how_ended(self.exit_code)
        if self._killed_because:
            how = f"was killed, because {self._killed_because}"
        return f"{self.name} (pid {self.pid}) {how}"


def start_process(
    command: Sequence[str], environment: Mapping[str, str], log: Path | None, **others: Any
) -> subprocess.Popen[bytes]:
    """Starts a process in a new session, which Ctrl-C and Jupyter's Stop do not reach.

    With a log, its output is appended there, and it has no stdin. `others` are arguments of `Popen`.
    """
    how: dict[str, Any] = {"env": dict(environment), "start_new_session": True, **others}
    if log is None:
        return subprocess.Popen(list(command), **how)
    with open(log, "ab", opener=open_private) as output:
        return subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **how)


def connect_to_parent() -> Connection:
    """Called in the child: returns its end of the socket pair, and prepares its output for the log."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        # The log is read as UTF-8, whatever the locale is.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    return Connection(descriptor)


def read_tail(log: Path, num_lines: int = 25) -> str:
    """Returns the last lines of a log; "" if it cannot be read."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-num_lines:])
    return ""


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    marker: str,
    limit_s: float,
    terminate_limit_s: float = 10.0,
    cwd: Path | None = None,
) -> int | None:
    """Runs a command by `start_process`, and ends all of its processes.

    Args:
        environment: All of its variables; one of them must contain `marker`, see `end_command`.
        terminate_limit_s: Time between SIGTERM and SIGKILL after `limit_s`.

    Returns:
        The exit code, -N = ended by signal N; None if it took longer than `limit_s`.
    """
    process = start_process(command, environment, log, cwd=cwd)
    try:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(limit_s)
        return process.poll()
    finally:
        end_command(process, marker, terminate_limit_s)


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
    """Ends a command, the leader of its session, by SIGTERM, after `limit_s` by SIGKILL. Kills what it leaves.

    Processes that it leaves are found by `marker`, a text that only the environment of this command contains, since
    launchers give each rank a session of its own.
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


def kill_rank(pid: int) -> None:
    """Kills a rank and its process group, because children of a rank may hold its device."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        send_signal(pid, signal.SIGKILL)  # It does not lead a group.


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
        # A process that is ending loses its environment before it releases files and devices.
        seen = {pid for pid in seen.union(found) if is_alive(pid)}
        if not (found or seen) or time.monotonic() > end_s:
            return sorted(seen)
        time.sleep(_POLL_S)
