"""A Python process that this one starts, ends and speaks to over a pair of sockets. No name, no port."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from unsloth_multigpu.wire.folder import make_log
from unsloth_multigpu.wire.process import kill_rank, wait_after_kill
from unsloth_multigpu.wire.wait import is_readable
from unsloth_multigpu.words import how_ended

_TAIL_LINES = 25
# It becomes the program. A debugger that is attached to this process goes into each Python that it sees being started,
# and lets it wait for a client of its own, which VS Code and JupyterLab never send; a shell it leaves alone.
_BY_SHELL = ("/bin/sh", "-c", 'exec "$0" "$@"')


class Child:
    """Starts the process, and holds what is known of it.

    Args:
        name: What a user calls it, like "rank 1".
        program: What it runs by `python -c`, and not by `-m`, since its `__main__` is the user's. `sys.argv[1]` is the
            number of its end of the pair.
        arguments: The rest of its `sys.argv`.
        log: Where its output goes.
        environment: All of its variables.

    Attributes:
        connection: This process's end of the pair, for the caller to own.
        exit_code: None while it lives; negative = the signal that ended it.
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
            if not log.exists():  # The folder was removed while processes were running.
                make_log(log)
            with log.open("ab") as output, theirs:
                self._process = subprocess.Popen(
                    [*_BY_SHELL, sys.executable, "-u", "-c", program, str(theirs.fileno()), *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    # Ctrl-C and Jupyter's Stop go to the process group; a child is told by this process.
                    start_new_session=True,
                )
            self.pid = self._process.pid
            stack.callback(self._process.wait)
            stack.callback(self.kill)
            self.pid_descriptor = os.pidfd_open(self.pid)
            stack.pop_all()

    def kill(self, because: str = "") -> None:
        """SIGKILL to the process and what it has started; `because` is shown to the user."""
        self._killed_because = self._killed_because or because
        kill_rank(self.pid)

    def has_ended(self, limit_s: float = 0.0) -> bool:
        """Waits for its end."""
        return is_readable(self.pid_descriptor, limit_s)

    def collect(self) -> None:
        """Takes the exit code of a process that has ended, and ends what it leaves behind."""
        # Before it is collected: until then no other process can have its number.
        kill_rank(self.pid)
        wait_after_kill(self._process)
        self.exit_code = -signal.SIGKILL if self._process.returncode is None else self._process.returncode

    def is_mine(self) -> bool:
        """True in the process that has started it, and not in a forked one."""
        return os.getpid() == self._started_by

    def describe_death(self) -> str:
        """How it ended, with the end of its log."""
        return f"{self.describe_end()}. The end of its log:\n{self.tail()}"

    def describe_end(self) -> str:
        """How it ended, in one line without a full stop."""
        how = "has not ended" if self.exit_code is None else how_ended(self.exit_code)
        if self._killed_because:
            how = f"was killed, because {self._killed_because}"
        return f"{self.name} (pid {self.pid}) {how}"

    def shown_log(self) -> Path:
        """Path of its log, relative to the current folder if it is below it."""
        with suppress(ValueError, FileNotFoundError):
            return self.log.relative_to(Path.cwd())
        return self.log

    def tail(self, num_lines: int = _TAIL_LINES) -> str:
        """The last lines of its log."""
        return read_tail(self.log, num_lines)


def read_tail(log: Path, num_lines: int = _TAIL_LINES) -> str:
    """The last lines of a log; "" where there is none."""
    with suppress(OSError):
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
    return ""
