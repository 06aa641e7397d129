"""Makes the object that carries out the strategy which the user named."""

from __future__ import annotations

import torch
from torch import nn

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.strategies.allreduce import AllReduceSync
from unsloth_multigpu.strategies.local import DiLoCoSync, LocalSGDSync
from unsloth_multigpu.strategies.parameter_server import ParameterServerSync
from unsloth_multigpu.strategies.sync import GradientSync
from unsloth_multigpu.strategy import AllReduce, DiLoCo, LocalSGD, ParameterServer


def make_sync(
    config: MultiGPUConfig, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_loss_scaled: bool
) -> GradientSync:
    """The exchange that `config.strategy` names.

    Args:
        config: `strategy` is not DDP, which torch implements.
        model: On this rank's device, without a wrapper.
        optimizer: torch's, not accelerate's wrapper.
        is_loss_scaled: A GradScaler scales the loss: mixed precision with fp16.
    """
    asked = config.strategy
    if isinstance(asked, AllReduce):
        return AllReduceSync(model, optimizer, asked.bucket_mb)
    if isinstance(asked, DiLoCo):
        return DiLoCoSync(model, optimizer, asked.every_steps, asked.outer_learning_rate, asked.outer_momentum)
    if isinstance(asked, LocalSGD):
        return LocalSGDSync(model, optimizer, asked.every_steps)
    assert isinstance(asked, ParameterServer)
    return ParameterServerSync(model, optimizer, asked.bucket_mb, is_loss_scaled=is_loss_scaled)
