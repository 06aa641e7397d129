"""The processes of one attempt: starts them, sends them signals and collects their exit codes, all in one thread."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.wire.child import kill_rank, start_process, wait_after_kill
from unsloth_multigpu.wire.identity import RankIdentity


@dataclass(eq=False, repr=False)
class Ranks:
    """The processes of this node's ranks, each the leader of its own session. Used by one thread.

    Attributes:
        exit_codes: Exit code of each rank that has ended; -N = ended by signal N.
    """

    processes: Mapping[int, subprocess.Popen[bytes]]
    exit_codes: dict[int, int] = field(default_factory=dict)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.send(signal.SIGKILL)
        for rank in self.living():
            wait_after_kill(self.processes[rank])

    def living(self) -> dict[int, int]:
        """Returns the process ids of the ranks that run, and collects the exit codes of the others."""
        for rank, process in self.processes.items():
            if rank not in self.exit_codes and (code := process.poll()) is not None:
                self.exit_codes[rank] = code
        return {rank: process.pid for rank, process in self.processes.items() if rank not in self.exit_codes}

    def send(self, signal_number: signal.Signals, ranks: Collection[int] | None = None) -> None:
        """Sends a signal to the process groups of living ranks. None = to all of them."""
        for rank, pid in self.living().items():
            if ranks is None or rank in ranks:
                if signal_number == signal.SIGKILL:
                    kill_rank(pid)
                else:
                    # It has ended meanwhile, or another user's program leads its group.
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal_number)


def start_ranks(command: Sequence[str], first: RankIdentity, environment: Mapping[str, str], log_dir: Path) -> Ranks:
    """Starts the ranks of this node. `first` keeps the terminal; the others write to a log and have no stdin.

    Raises:
        LaunchError: The system cannot start another process.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        ranks = stack.enter_context(Ranks(processes))
        for local_rank in range(first.local_world_size):
            rank = first.rank + local_rank
            variables = {**environment, **replace(first, rank=rank, local_rank=local_rank).variables()}
            log = None if local_rank == 0 else log_dir / f"rank_{rank}.log"
            try:
                processes[rank] = start_process(command, variables, log)
            except OSError as error:
                raise LaunchError(
                    f"rank {rank} could not be started: {error}.",
                    hint="Free memory or end processes on this machine, or start fewer ranks.",
                ) from error
        stack.pop_all()
    return ranks
