"""Wraps the model of a plain PyTorch loop in DDP, and unwraps it.

Imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.manager import DDPManager, local_device
from unsloth_multigpu.group.model import inner_name
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.option_type import Scope
from unsloth_multigpu.options import MultiGPUConfig

logger = get_logger(__name__)


def wrap_model(model: nn.Module, manager: DDPManager, *, find_unused_parameters: bool = False) -> nn.Module:
    """See `unsloth_multigpu.wrap_model_multi_gpu`. Collective in ranks."""
    if any(isinstance(m, DistributedDataParallel) for m in _chain(model)):
        return model
    _refuse_options_of_trainers(manager.config)
    is_rank = manager.identity.world_size > 1
    device = _device(manager)
    _place(model, device, can_stay=not is_rank)
    logger.info("model is_ddp=%s world_size=%d device=%s", is_rank, manager.identity.world_size, device)
    return _with_ddp(model, manager, device, find_unused_parameters) if is_rank else model


def unwrap_model(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and `torch.compile`, in any order and number."""
    *_, innermost = _chain(model)
    return innermost


def _chain(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model, the model that it wraps, and so on."""
    yield model
    while (name := inner_name(model)) is not None:
        model = getattr(model, name)
        yield model


def _refuse_options_of_trainers(config: MultiGPUConfig) -> None:
    """Refuses options of enable_multi_gpu that have no effect in a plain loop."""
    if asked := config.asked(Scope.TRAINER):
        raise SetupError(
            f"{asked[0]} needs a transformers.Trainer, and has no effect in a plain loop.",
            hint=f"Leave {asked[0].partition('=')[0]} out.",
        )


def _device(manager: DDPManager) -> torch.device:
    device = local_device(manager.identity, manager.config)
    if manager.identity.world_size > 1 and device.type != "cpu":
        # NCCL and "cuda" without an index use the current device.
        torch.accelerator.set_device_index(device.index)
    return device


def _place(model: nn.Module, device: torch.device, *, can_stay: bool) -> None:
    """Moves the model to the device.

    Args:
        can_stay: Leave it on another accelerator if the script has moved it there.
    """
    places = {t.device for t in chain(model.parameters(), model.buffers())}
    if places <= {device} or (can_stay and any(p.type not in ("cpu", "meta") for p in places)):
        return
    model.to(device)


def _with_ddp(
    model: nn.Module, manager: DDPManager, device: torch.device, find_unused_parameters: bool
) -> DistributedDataParallel:
    if not any(p.requires_grad for p in model.parameters()):
        raise SetupError(
            "No parameter of the model requires a gradient: there is nothing to train.",
            hint="Set requires_grad before wrapping; a model that is not trained needs no wrapper.",
        )
    manager.open_group()
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        find_unused_parameters=find_unused_parameters,
        # Saves a copy of the gradients.
        gradient_as_bucket_view=True,
    )
