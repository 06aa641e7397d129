"""DDPLauncher: turns this process into the supervisor of N ranks of one command. Torch elastic is the engine."""

from __future__ import annotations

import os
import random
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from unsloth_multigpu.config import (
    ENV_LOG_DIR_OF_RUN,
    ENV_RUN_DIR,
    ENV_RUN_ID,
    ENV_RUN_SEED,
    ENV_SUPERVISOR_PID,
    MultiGPUConfig,
)
from unsloth_multigpu.fault.beat import read_beats
from unsloth_multigpu.launch.cause import Cause, find_cause
from unsloth_multigpu.launch.folder import exclusive_log_dir, private_dir
from unsloth_multigpu.launch.watch import Watch
from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class DDPLauncher:
    """Starts the ranks of one node and watches over them until the last one has ended.

    Args:
        command: What every rank executes.
        num_ranks: Ranks to start; rank r drives device r.
        config: The run's options.
    """

    command: Sequence[str]
    num_ranks: int
    config: MultiGPUConfig

    def run(self) -> int:
        """Blocks until all ranks have ended.

        Returns:
            The exit code of the rank that failed first, 128 + n where signal n ended it, 0 if all went well;
            -n where signal n was sent to this process, which should then end by it.

        Raises:
            LaunchError: The log folder cannot be written.
        """
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from unsloth_multigpu.launch.engine import run_elastic
        from unsloth_multigpu.launch.rendezvous import LoopbackRendezvous, Rounds

        with ExitStack() as stack:
            run_dir = stack.enter_context(private_dir())
            log_dir = stack.enter_context(exclusive_log_dir(Path(self.config.log_dir), self.num_ranks))
            run_id = self.config.rdzv_id or uuid.uuid4().hex
            os.environ.update(rank_environment(self.num_ranks, run_dir, log_dir, run_id, os.environ))
            logger.info("starting ranks=%d, ranks above 0 write to %s/rank_N.log", self.num_ranks, log_dir)
            watch = stack.enter_context(Watch(run_dir, _tell_restart))
            try:
                rounds = Rounds(LoopbackRendezvous(run_id))
                run_elastic(self.command, self.num_ranks, self.config, run_id, run_dir, rounds)
            except ChildFailedError as failed:
                exit_codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
                watch.close()
                cause = find_cause(watch.events(), exit_codes, watch.gone, read_beats(run_dir))
                _tell(cause, log_dir, self.num_ranks, sys.stderr)
                return cause.exit_code
            except SignalException as stopped:
                sys.stderr.write(f"\nunsloth_multigpu: stopped by {stopped.sigval.name}, all ranks have ended.\n")
                return -int(stopped.sigval)
            return 0


def rank_environment(
    num_ranks: int, run_dir: Path, log_dir: Path, run_id: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Variables that all ranks get beside those of torch elastic; what the user has set stays.

    Threads are shared out: without a limit every rank would start one thread for each core.
    """
    run_seed = str(random.SystemRandom().randrange(2**32))
    defaults = {
        # The order of a set of strings, and choices that the script makes without a seed, are the same on all ranks.
        "PYTHONHASHSEED": run_seed,
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return {
        **{name: value for name, value in defaults.items() if not environment.get(name)},
        ENV_RUN_DIR: str(run_dir),
        ENV_RUN_SEED: run_seed,
        ENV_LOG_DIR_OF_RUN: str(log_dir),
        ENV_SUPERVISOR_PID: str(os.getpid()),
        ENV_RUN_ID: run_id,
    }


def exit_like(code: int) -> None:
    """Ends this process as `DDPLauncher.run` says: with an exit code, or by the signal -code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # The script must not go on in the supervisor, not even in an `except SystemExit` around the user's line.
    os._exit(code if code >= 0 else 128 - code)


def _tell(cause: Cause, log_dir: Path, num_ranks: int, out: TextIO) -> None:
    out.write(f"\n{cause.traceback}unsloth_multigpu: {cause.message}. The other ranks were stopped.\n")
    if not cause.traceback and cause.rank > 0:
        tail = (log_dir / f"rank_{cause.rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        out.write("".join(f"  [rank {cause.rank}] {line[:200]}\n" for line in tail))
    if num_ranks > 1:
        out.write(f"unsloth_multigpu: logs of ranks 1..{num_ranks - 1}: {log_dir}/rank_N.log\n")


def _tell_restart(cause: Cause, attempt: int) -> None:
    sys.stderr.write(f"\n{cause.traceback}unsloth_multigpu: {cause.message}. Starting all ranks again ({attempt}).\n")
