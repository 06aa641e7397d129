"""Which strategy the options of a run name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unsloth_multigpu.config import MultiGPUConfig
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.sync.allreduce import AllReduceSync
from unsloth_multigpu.sync.asynchronous import AsyncParameterServerSync
from unsloth_multigpu.sync.local import DiLoCoSync, LocalSGDSync
from unsloth_multigpu.sync.parameter_server import ParameterServerSync
from unsloth_multigpu.sync.strategy import GradientSync


def make_sync(
    config: MultiGPUConfig, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_loss_scaled: bool
) -> GradientSync:
    """The strategy that `config.sync` names, with its options or their defaults.

    Args:
        config: `sync` is not "ddp", which is torch's own and needs no strategy of ours.
        model: On this rank's device, without a wrapper.
        optimizer: torch's, not accelerate's wrapper.
        is_loss_scaled: A GradScaler scales the loss: mixed precision with fp16.

    Raises:
        SetupError: The strategy cannot work with a scaled loss.
    """
    options: dict[str, Any] = {
        "bucket_mb": config.sync_bucket_mb,
        "every_steps": config.sync_every_steps,
        "learning_rate": config.outer_learning_rate,
        "momentum": config.outer_momentum,
    }
    # None = the strategy's own default. The config refuses options that the strategy does not know.
    given = {name: value for name, value in options.items() if value is not None}
    if config.sync != "parameter_server":
        strategies = {"allreduce": AllReduceSync, "local_sgd": LocalSGDSync, "diloco": DiLoCoSync}
        return strategies[config.sync](model, optimizer, **given)
    if config.max_staleness_steps is None:
        return ParameterServerSync(model, optimizer, **given, is_loss_scaled=is_loss_scaled)
    # Each rank's scale would be its own, and the server could not tell whose gradient has which.
    if is_loss_scaled:
        raise SetupError(
            f"max_staleness_steps={config.max_staleness_steps} cannot work with fp16=True, whose gradients are scaled.",
            hint="Use bf16=True, or leave max_staleness_steps out.",
        )
    return AsyncParameterServerSync(
        model, optimizer, max_staleness_steps=config.max_staleness_steps, timeout_s=config.timeout_s
    )
