"""Torch elastic, set up for the ranks of this node."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from unsloth_multigpu.launch.membership import ENV_ROUND, explain
from unsloth_multigpu.launch.rendezvous import Rounds
from unsloth_multigpu.launch.watch import POLL_S
from unsloth_multigpu.options import ENV_LOG_DIR_OF_RUN, MultiGPUConfig, num_nodes

# How long the engine waits after SIGTERM before it kills a rank.
_SHUTDOWN_LIMIT_S = 30
# The first rank of a node keeps the terminal; the others write to their log and read nothing. `exec` keeps the process
# id. Torch counts restarts on each node separately, but all ranks must read the same number.
_RANK_SHELL = f"""
if [ -n "${ENV_ROUND}" ]; then export TORCHELASTIC_RESTART_COUNT="${ENV_ROUND}"; unset {ENV_ROUND}; fi
if [ "$LOCAL_RANK" = 0 ]; then exec "$@"; fi
log="${ENV_LOG_DIR_OF_RUN}/rank_$RANK.log"
[ -e "$log" ] || (umask 077; set -C; : >"$log")
exec "$@" </dev/null >>"$log" 2>&1
"""


def run_elastic(
    command: Sequence[str], num_ranks: int, config: MultiGPUConfig, run_id: str, run_dir: Path, rounds: Rounds
) -> None:
    """Starts `num_ranks` ranks of `command` and blocks until all have ended.

    Args:
        run_id: Identifier of the run.
        run_dir: The run's private folder.
        rounds: Is told of every start of the ranks, and may refuse it.

    Raises:
        LaunchError: The nodes could not meet, or lost each other.
        ChildFailedError: Torch's, with the exit code of each rank that failed.
        SignalException: Torch's, where a signal or `rounds` ended the run.
    """
    # The engine's own log repeats what this package reports. Each of its loggers has a level of its own.
    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def create(_params: object) -> RendezvousHandler:
        return rounds

    rendezvous_handler_registry.register(rounds.get_backend(), create)
    fewest, most = num_nodes(config.nnodes)
    launch_config = LaunchConfig(
        min_nodes=fewest,
        max_nodes=most,
        nproc_per_node=num_ranks,
        run_id=run_id,
        rdzv_backend=rounds.get_backend(),
        rdzv_endpoint=config.rdzv_endpoint or "127.0.0.1:0",
        max_restarts=config.max_restarts,
        monitor_interval=POLL_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir / "elastic")),
        **_later_options(),
    )
    # Elastic expands templates such as ${local_rank}; a dollar sign in the user's command must stay unchanged.
    arguments = [a.replace("$", "$$") for a in ("-c", _RANK_SHELL, "sh", *command)]
    try:
        elastic_launch(launch_config, "/bin/sh")(*arguments)
    except RendezvousError as error:
        raise explain(error, config) from error


def _later_options() -> dict[str, Any]:
    """Options that older versions of torch do not have."""
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return {
        # Since torch 2.13; before, the engine's limit is fixed at the same 30 s.
        **({"shutdown_timeout": _SHUTDOWN_LIMIT_S} if "shutdown_timeout" in known else {}),
        # The others are `stop.SIGNALS`. Before, the engine takes them with each start, and `Stop` takes them back.
        **({"signals_to_handle": "SIGQUIT"} if "signals_to_handle" in known else {}),
    }
