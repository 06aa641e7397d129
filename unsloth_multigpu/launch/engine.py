"""The processes of one attempt: started together, sent signals by group, collected by the thread that started them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.wire.process import kill_rank, wait_after_kill


@dataclass(frozen=True)
class Place:
    """Where the ranks of this node stand among those of all nodes, and where they meet.

    Args:
        first_rank: The first rank of this node.
        world_size: Ranks of all nodes.
        node: Number of this node.
        master_addr: Host of the store of the ranks.
        master_port: Its port.
    """

    first_rank: int
    world_size: int
    node: int
    master_addr: str
    master_port: int

    def variables(self, local_rank: int, num_ranks: int) -> dict[str, str]:
        """Of one rank, as torchrun sets them."""
        return {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


class Ranks:
    """The processes of this node's ranks. Used by one thread.

    Args:
        processes: Rank -> its process, which leads a session of its own.

    Attributes:
        exit_codes: Rank -> exit code of those that have ended; negative = the signal that ended it.
    """

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self.exit_codes: dict[int, int] = {}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leaves no rank behind, whatever has happened."""
        self.send(signal.SIGKILL)
        for rank in self.living():
            wait_after_kill(self._processes[rank])

    @property
    def num_ranks(self) -> int:
        """How many were started."""
        return len(self._processes)

    def living(self) -> dict[int, int]:
        """Rank -> process id of those that have not ended. Collects those that have."""
        for rank, process in self._processes.items():
            if rank not in self.exit_codes and (code := process.poll()) is not None:
                self.exit_codes[rank] = code
        return {rank: process.pid for rank, process in self._processes.items() if rank not in self.exit_codes}

    def send(self, signal_number: signal.Signals, ranks: Collection[int] | None = None) -> None:
        """Sends a signal to living ranks and what they have started; None = to all of them."""
        for rank, pid in self.living().items():
            if ranks is None or rank in ranks:
                if signal_number == signal.SIGKILL:
                    kill_rank(pid)
                else:
                    # It has ended since, or another user's program leads its group.
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal_number)


def start_ranks(
    command: Sequence[str], num_ranks: int, place: Place, environment: Mapping[str, str], log_dir: Path
) -> Ranks:
    """Starts the ranks of this node. The first one keeps the terminal; the others write to their log and read nothing.

    Args:
        command: What each rank executes.
        num_ranks: Ranks of this node.
        place: Where they stand.
        environment: All variables, but for those that differ between ranks.
        log_dir: Folder of rank_N.log.

    Raises:
        LaunchError: The system starts no further process.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {}
    for local_rank in range(num_ranks):
        rank = place.first_rank + local_rank
        variables = {**environment, **place.variables(local_rank, num_ranks)}
        try:
            processes[rank] = start_process(
                command, variables, None if local_rank == 0 else log_dir / f"rank_{rank}.log"
            )
        except BaseException as error:
            with Ranks(processes):
                pass  # Ends those that were started.
            if not isinstance(error, OSError):
                raise
            raise LaunchError(
                f"rank {rank} could not be started: {error}.",
                hint="Free memory and processes of this machine, or start fewer ranks.",
            ) from error
    return Ranks(processes)


def start_process(command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    """Starts a process that leads a session of its own.

    Args:
        environment: All of its variables.
        log: Where its output is appended; it then reads nothing. None = it has the terminal.
    """
    if log is None:
        return subprocess.Popen(list(command), env=dict(environment), start_new_session=True)
    with open(log, "ab", opener=_open_private) as output:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _open_private(path: str, flags: int) -> int:
    # Others may be allowed to write in the folder of logs: a link in a log's place is not followed.
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
