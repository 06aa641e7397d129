"""One worker process, as the kernel sees it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.launch.process import kill_rank
from unsloth_multigpu.notebook.channel import Channel

# A message that a worker has not read after so long ends it: its thread reads unless native code keeps the lock.
_SEND_LIMIT_S = 30.0
# From SIGKILL until the process is gone; a driver may hold it longer.
_KILL_LIMIT_S = 5.0
_TAIL_LINES = 25
# Not by -m: a cell must find a `__main__` of its own.
_PROGRAM = "from unsloth_multigpu.notebook.worker import main; main()"


class Worker:
    """Starts the process of a rank above 0, and holds what is known of it.

    Args:
        rank: Which rank.
        log: Where its output goes.
        environment: All of its variables.

    Attributes:
        is_ready: It waits for cells.
        exit_code: None while it lives; negative = the signal that ended it.
        ended: The message by which it ended a cell, by the cell's number. The last ones.
        waits: The last collective before what it waits for rank 0 to make, in this cell; None = it does not wait.
    """

    def __init__(self, rank: int, log: Path, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.log = log
        self.is_ready = False
        self.exit_code: int | None = None
        self.ended: dict[int, dict[str, Any]] = {}
        self.waits: int | None = None
        self._killed_because = ""
        self._started_by = os.getpid()
        ours, theirs = socket.socketpair()
        with ExitStack() as stack:
            stack.callback(ours.close)
            with log.open("ab") as output, theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", _PROGRAM, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    # Jupyter sends Stop to the kernel's whole group of processes; a worker is told by the kernel.
                    start_new_session=True,
                )
            self.pid = self._process.pid
            stack.callback(self._process.wait)
            stack.callback(self.kill)
            self.pid_descriptor = os.pidfd_open(self.pid)
            stack.pop_all()
        self.channel = Channel(ours, _SEND_LIMIT_S)

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message; one that nobody reads ends a process that is stopped."""
        if self.exit_code is not None:
            return
        try:
            self.channel.send(kind, **fields)
        except TimeoutError:
            self.kill(f"it has read nothing for {_SEND_LIMIT_S:g} seconds")
        except OSError:
            self.kill()  # It is ending.

    def kill(self, because: str = "") -> None:
        """SIGKILL to the worker and what it has started.

        Args:
            because: What the user is to read of it.
        """
        self._killed_because = self._killed_because or because
        kill_rank(self.pid)

    def collect(self) -> None:
        """Takes the exit code of a process that has ended, and ends what it leaves behind."""
        # Before it is collected: until then nobody else can have its number.
        kill_rank(self.pid)
        try:
            self.exit_code = self._process.wait(_KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.exit_code = -signal.SIGKILL

    def end(self, limit_s: float) -> None:
        """Asks the process to end, and kills it after `limit_s`."""
        if self.exit_code is not None or os.getpid() != self._started_by:
            return
        with suppress(OSError):
            self.channel.send("exit")
        poll = select.poll()
        poll.register(self.pid_descriptor, select.POLLIN)
        poll.poll(limit_s * 1000)
        self.collect()

    def close(self) -> None:
        """Lets go of the descriptors, here or in a forked child."""
        self.channel.close()
        os.close(self.pid_descriptor)

    def describe_death(self) -> str:
        """How it ended, with the end of its log."""
        return f"{self.describe_end()}. The end of its log:\n{self.tail()}"

    def describe_end(self) -> str:
        """How it ended, in one line without a full stop."""
        code = self.exit_code
        how = f"has ended with exit code {code}"
        if self._killed_because:
            how = f"was killed, because {self._killed_because}"
        elif code is not None and code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
            how = f"was ended by {name}"
            if code == -signal.SIGKILL:
                how += ", as the system does when the machine has no memory left"
        return f"rank {self.rank} (pid {self.pid}) {how}"

    def shown_log(self) -> Path:
        """Where its log is, from the notebook's folder where it is below it."""
        with suppress(ValueError, FileNotFoundError):
            return self.log.relative_to(Path.cwd())
        return self.log

    def tail(self, num_lines: int = _TAIL_LINES) -> str:
        """The last lines of its log."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
        return ""


def died(worker: Worker) -> DistributedError:
    """What the user reads of a worker that has ended."""
    return DistributedError(
        worker.describe_death(),
        hint="This kernel goes on alone and keeps its model: save it. Restart the kernel to train on all ranks.",
    )
