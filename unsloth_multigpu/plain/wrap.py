"""Puts the model of a plain PyTorch loop on the devices of this process, and takes wrappers off again.

Imported inside functions only.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.nn.parallel import DataParallel, DistributedDataParallel

from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.group.manager import DDPManager, local_device
from unsloth_multigpu.group.model import inner_name
from unsloth_multigpu.launch.rank import leave_group_at_exit
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.row import Scope
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, RankIdentity, read_identity

logger = get_logger(__name__)

STRATEGIES = ("auto", "ddp", "data_parallel", "none")
# What bitsandbytes and transformers write on models with quantised weights.
_QUANTISED_FLAGS = ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")


class GroupManager(DDPManager):
    """The manager of a rank in which `enable_multi_gpu` was not called.

    Its store is the one of the process group, which the script may have opened by means that no variable tells of.
    """

    @property
    def store(self) -> Store:
        """Keys and values shared by all ranks. Before there is a group, that of the launcher's variables."""
        if not dist.is_initialized():
            return super().store
        return PrefixStore("unsloth_multigpu/plain", _get_default_store())

    def open_group(self) -> None:
        """Opens the group where neither the script nor a library has, and leaves it when the process ends."""
        if self.identity.world_size > 1 and not dist.is_initialized():
            # srun and mpirun name them otherwise; torch reads these.
            os.environ.update(self.identity.variables())
            leave_group_at_exit(_has_failed)
        super().open_group()


def manager_of(identity: RankIdentity, config: MultiGPUConfig) -> GroupManager:
    """The manager of a rank: the same one for each call in a group, since it counts the saves in the group's store."""
    return _manager_in(_get_default_store() if dist.is_initialized() else None, identity, config)


@functools.cache
def _manager_in(store: Store | None, identity: RankIdentity, config: MultiGPUConfig) -> GroupManager:
    return GroupManager(identity, config)


def current_identity(environment: Mapping[str, str]) -> RankIdentity:
    """The place that a launcher gave this process, else its place in the group that the script opened, else alone.

    Raises:
        LaunchError: The launcher's variables contradict each other or are incomplete.
    """
    identity = read_identity(environment, starts_ranks=dist.is_initialized())
    if identity is not None:
        return identity
    if not dist.is_initialized():
        return SINGLE_PROCESS
    # Without a launcher (torch.multiprocessing.spawn, say) the local rank is not known; ranks of one machine differ.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return RankIdentity(rank, rank, world_size, world_size, launcher="group")


def wrap_model(
    model: nn.Module, manager: DDPManager, strategy: str = "auto", *, find_unused_parameters: bool | None = None
) -> nn.Module:
    """See `unsloth_multigpu.wrap_model_multi_gpu`. Collective in ranks, unless `strategy` is "none"."""
    if _is_wrapped(model, strategy):
        return model
    if strategy != "none":
        _refuse_options_of_trainers(manager.config)
    reason = one_device_reason(model)
    num_devices = num_single_process_devices(manager.identity, manager.config)
    is_rank = manager.identity.world_size > 1 or dist.is_initialized()
    chosen = choose_strategy(strategy, is_rank=is_rank, num_devices=num_devices, one_device_reason=reason)
    if strategy == "auto" and chosen == "none" and num_devices > 1:
        logger.warning("this process uses 1 of %d GPUs: %s; enable_multi_gpu() uses all", num_devices, reason)
    device = _device(manager)
    _place(model, device, can_stay=manager.identity.world_size == 1 and chosen == "none")
    logger.info("model strategy=%s world_size=%d device=%s", chosen, manager.identity.world_size, device)
    if chosen == "data_parallel":
        return DataParallel(model, device_ids=list(range(num_devices)))
    if chosen == "ddp":
        return _with_ddp(model, manager, device, find_unused_parameters)
    return model


def choose_strategy(asked: str, *, is_rank: bool, num_devices: int, one_device_reason: str | None) -> str:
    """Decides how a model is wrapped. Pure.

    Args:
        asked: One of `STRATEGIES`.
        is_rank: This process is a rank of a process group.
        num_devices: Devices that it may use otherwise.
        one_device_reason: Why several devices in one process cannot hold the model; None if they can.

    Returns:
        "ddp", "data_parallel" or "none".

    Raises:
        ConfigError: `asked` is none of the strategies.
        SetupError: What was asked is not possible here.
    """
    if asked not in STRATEGIES:
        raise ConfigError(
            f"strategy={asked!r}; expected {' or '.join(map(repr, STRATEGIES))}.", hint='Set strategy="auto".'
        )
    if asked == "auto":
        if is_rank:
            return "ddp"
        return "data_parallel" if num_devices > 1 and one_device_reason is None else "none"
    if asked == "ddp" and not is_rank:
        raise SetupError(
            "strategy='ddp', but this process is no rank of a process group.",
            hint="Call enable_multi_gpu() as the first line of the script, or start it with torchrun.",
        )
    if asked == "data_parallel":
        obstacle = "each rank has one device" if is_rank else one_device_reason
        if not is_rank and num_devices < 2:
            obstacle = f"this process uses {num_devices} GPU(s)"
        if obstacle is not None:
            raise SetupError(f"strategy='data_parallel' is not possible: {obstacle}.", hint='Set strategy="auto".')
    return asked


def one_device_reason(model: nn.Module) -> str | None:
    """Why `nn.DataParallel`, which copies modules and runs each copy in a thread, cannot hold the model, or None."""
    if (reason := _fixed_place_reason(model)) is not None:
        return reason
    # Unsloth replaces the forward functions of whole model families.
    if any(str(getattr(m.forward, "__module__", "")).lower().startswith("unsloth") for m in model.modules()):
        return "Unsloth's functions and buffers belong to one device"
    if any(inner_name(m) == "_orig_mod" for m in model.modules()):
        return "a compiled model runs on the device that it was compiled for"
    return None


def num_single_process_devices(identity: RankIdentity, config: MultiGPUConfig) -> int:
    """How many accelerators one process that is no rank may use; 1 where there is none."""
    if identity.launcher != "none" or local_device(identity, config).type == "cpu":
        return 1
    available = torch.accelerator.device_count()
    if config.num_gpus is not None and config.num_gpus > available:
        raise SetupError(
            f"num_gpus={config.num_gpus}, but {available} GPU(s) are visible.", hint=f"Set num_gpus={available}."
        )
    return config.num_gpus or available


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model itself, below DistributedDataParallel, DataParallel and `torch.compile` in any order and number."""
    *_, innermost = _chain(model)
    return innermost


def _chain(model: nn.Module) -> Iterator[nn.Module]:
    """The model, what it wraps, and so on."""
    yield model
    while (name := inner_name(model)) is not None:
        model = getattr(model, name)
        yield model


def _is_wrapped(model: nn.Module, asked: str) -> bool:
    """True if the model is wrapped already, as it was asked for.

    Raises:
        ConfigError: It is wrapped in another way.
    """
    kinds = {DistributedDataParallel: "ddp", DataParallel: "data_parallel"}
    present = next((kind for m in _chain(model) for cls, kind in kinds.items() if isinstance(m, cls)), None)
    if present is not None and asked not in ("auto", present):
        raise ConfigError(
            f"strategy={asked!r}, but the model is wrapped with {present!r} already.",
            hint="Wrap what unwrap_model(model) returns.",
        )
    return present is not None


def _refuse_options_of_trainers(config: MultiGPUConfig) -> None:
    """Refuses options of enable_multi_gpu that nothing follows in a plain loop."""
    if asked := config.asked(Scope.TRAINER):
        raise SetupError(
            f"{asked[0]} needs a transformers.Trainer, and nothing follows it in a plain loop.",
            hint=f"Leave {asked[0].partition('=')[0]} out.",
        )


def _fixed_place_reason(model: nn.Module) -> str | None:
    if getattr(model, "hf_device_map", None):
        return "its device map has placed it"
    if any(getattr(model, flag, False) is True for flag in _QUANTISED_FLAGS):
        return "its weights are quantised"
    # A model that only contains a quantised one.
    if any(type(p).__name__ in ("Params4bit", "Int8Params") for p in model.parameters()):
        return "its weights are quantised"
    return None


def _device(manager: DDPManager) -> torch.device:
    device = local_device(manager.identity, manager.config)
    if manager.identity.world_size > 1 and device.type != "cpu":
        # NCCL and "cuda" without a number mean the current one.
        torch.accelerator.set_device_index(device.index)
    return device


def _place(model: nn.Module, device: torch.device, *, can_stay: bool) -> None:
    """Moves the model to the device.

    Args:
        can_stay: It may stay on another accelerator, where the script has put it.
    """
    places = {t.device for t in chain(model.parameters(), model.buffers())}
    if places <= {device} or (can_stay and any(p.type not in ("cpu", "meta") for p in places)):
        return
    if (reason := _fixed_place_reason(model)) is not None:
        raise SetupError(
            f"The model lies on {', '.join(sorted(map(str, places)))} and belongs on {device}, but {reason}.",
            hint=f"Load it with device_map={{'': {device.index or 0}}}: the local rank.",
        )
    model.to(device)


def _with_ddp(
    model: nn.Module, manager: DDPManager, device: torch.device, find_unused_parameters: bool | None
) -> DistributedDataParallel:
    if not any(p.requires_grad for p in model.parameters()):
        raise SetupError(
            "No parameter of the model requires a gradient: there is nothing to train together.",
            hint='Set requires_grad before wrapping, or strategy="none" for a model that is only used.',
        )
    manager.open_group()
    if find_unused_parameters is None:
        find_unused_parameters = bool(manager.config.find_unused_parameters)
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        find_unused_parameters=find_unused_parameters,
        # The gradients are the buckets, and not a copy of them.
        gradient_as_bucket_view=True,
    )


def _has_failed() -> bool:
    """True where an error ends this process: Python keeps the one that it has shown."""
    return hasattr(sys, "last_value")
