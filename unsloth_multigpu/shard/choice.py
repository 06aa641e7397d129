"""shard="auto": the process that starts the ranks decides once, by the forecast of the script's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig, num_nodes
from unsloth_multigpu.shard.memory import Mode, decide, decide_as_before, in_gib
from unsloth_multigpu.shard.probe import Question, ask
from unsloth_multigpu.wire.context import ShardChoice

logger = get_logger(__name__)

_BY_HAND = "Set shard='on' or shard='off'."


def choose(
    command: Sequence[str], environment: Mapping[str, str], config: MultiGPUConfig, num_ranks: int
) -> ShardChoice:
    """Runs the script up to its first `train()` without weights, and chooses DDP where it fits, else sharding.

    A checkpoint that resume="auto" goes on from decides instead, by the mode in which it was written.

    Args:
        command: What a rank executes.
        environment: All of its variables.
        config: The run's options.
        num_ranks: Ranks of this machine.

    Raises:
        SetupError: Neither fits, or not that of the checkpoint, the step cannot be counted, or several nodes would each
            choose.
        RankTimeoutError: The script does not come to `train()`.
    """
    if num_nodes(config.nnodes) != 1:
        raise SetupError("shard='auto' is decided on one machine, and this run has several nodes.", hint=_BY_HAND)
    logger.info("shard=auto: runs the script up to train() without weights, to count the memory of its first step")
    # CPU ranks share the memory of the machine.
    of_machine = psutil.virtual_memory().total // num_ranks
    modes: tuple[Mode, ...] = ("ddp", "sharded") if num_ranks > 1 else ("ddp",)
    rows = tuple((mode, num_ranks) for mode in modes)
    answer = ask(command, environment, Question(rows, otherwise_bytes=of_machine, is_choice=True))
    device_bytes = answer.device_bytes or of_machine
    if answer.earlier is None:
        decision = decide(answer.training, answer.forecasts, num_ranks, device_bytes)
    else:
        decision = decide_as_before(answer.forecasts[-1], device_bytes, folder=answer.earlier.folder)
    logger.info("shard=auto: %s", decision.text)
    wanted = next(row for row in answer.forecasts if (row.mode, row.num_ranks) == (decision.mode, num_ranks))
    host_bytes = psutil.virtual_memory().total
    if num_ranks * wanted.host > host_bytes:
        raise SetupError(
            f"shard_offload=True: {num_ranks} ranks keep {in_gib(wanted.host)} GiB each in the host's memory, of which "
            f"there are {in_gib(host_bytes)}.",
            hint="Leave shard_offload out, or train fewer parameters (LoRA).",
        )
    return ShardChoice("on" if decision.mode == "sharded" else "off", wanted.allocated, decision.text)
