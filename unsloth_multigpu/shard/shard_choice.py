"""Decides shard="auto" in the supervisor, by the memory that a step of the script needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.shard.memory import Mode, decide
from unsloth_multigpu.shard.script_probe import Question, ask

logger = get_logger(__name__)


def choose(command: Sequence[str], environment: Mapping[str, str], config: MultiGPUConfig, num_ranks: int) -> str:
    """Runs the script up to its first `train()` without weights, and chooses DDP if it fits, else sharding.

    Args:
        command: Command line of a rank.
        environment: All of its variables.
        config: The run's options.
        num_ranks: Ranks of this machine.

    Returns:
        The value of `shard`: "on" or "off".

    Raises:
        SetupError: Neither fits, the memory of the step cannot be counted, or the run has several nodes.
        RankTimeoutError: The script does not reach `train()` in time.
    """
    if config.num_nodes != 1:
        raise SetupError(
            "shard='auto' is decided on one machine, and this run has several nodes.",
            hint="Set shard='on' or shard='off'.",
        )
    logger.info("shard=auto: runs the script up to train() without weights, to count the memory of its first step")
    # CPU ranks share the memory of the machine.
    of_machine = psutil.virtual_memory().total // num_ranks
    modes: tuple[Mode, ...] = ("ddp", "sharded") if num_ranks > 1 else ("ddp",)
    rows = tuple((mode, num_ranks) for mode in modes)
    answer = ask(command, environment, Question(rows, otherwise_bytes=of_machine, is_choice=True))
    mode, text = decide(answer.training, answer.forecasts, num_ranks, answer.device_bytes or of_machine)
    logger.info("shard=auto: %s", text)
    return "on" if mode == "sharded" else "off"
