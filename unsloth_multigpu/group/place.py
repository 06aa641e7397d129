"""The sentence at the start of a run: how many ranks train, and on which devices."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from unsloth_multigpu.accelerator import CHOOSERS, KINDS
from unsloth_multigpu.group.manager import find_accelerator, local_device, ranks_share_device, sends_over_host
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.words import gib


def describe_lone_process(num_visible: int, config: MultiGPUConfig, environment: Mapping[str, str]) -> str:
    """Returns why this process trains alone, and how many accelerators are visible, in case that was not intended."""
    if not config.enable_ddp:
        return f"enable_ddp=False: this process computes {config.num_gpus or max(1, num_visible)} replicas in turn"
    if config.device == "cpu":
        return "device='cpu': this process trains alone, on the CPU"
    chosen = "".join(f" ({name}={environment[name]!r})" for name in CHOOSERS if name in environment)
    if not num_visible:
        is_for_devices = any(getattr(torch.version, name, None) for name in ("hip", *KINDS))
        build = "" if is_for_devices else f", torch {torch.__version__} is built for the CPU only"
        return f"no GPU is visible{chosen}{build}: this process trains alone; num_gpus=2 starts two ranks on the CPU"
    if num_visible > 1:
        return f"{num_visible} GPUs are visible{chosen}, num_gpus=1: this process trains alone"
    return f"1 GPU is visible{chosen}: this process trains alone"


NO_ACCELERATOR = "no accelerator is visible"


def describe_ranks(identity: RankIdentity, config: MultiGPUConfig) -> str:
    """Returns how many ranks train on which devices. Called on rank 0, which has opened its device."""
    num_ranks = f"{identity.world_size} ranks"
    if identity.world_size > identity.local_world_size:
        num_ranks += f" on {identity.world_size // identity.local_world_size} nodes, here"
    device = local_device(identity, config)
    if device.type == "cpu":
        num_threads, num_cores = torch.get_num_threads(), os.cpu_count() or 1
        why = "" if config.device == "cpu" else f"{NO_ACCELERATOR}: "
        share = f", which share {num_cores} core(s)" if identity.local_world_size > num_cores else ""
        return f"{why}{num_ranks} on the CPU, {num_threads} thread{'s' if num_threads > 1 else ''} each{share}"
    module = torch.get_device_module(device)
    num_visible, indices = module.device_count(), [device.index]
    if num_visible >= identity.local_world_size:
        indices = list(range(identity.local_world_size))
    elif ranks_share_device(num_visible, os.environ):
        num_ranks += f" that share one GPU{' over gloo' if sends_over_host() else ''},"
    else:
        # The launcher shows each rank its own device only.
        num_ranks += f" on {identity.local_world_size} devices, rank {identity.rank}"
    properties = [module.get_device_properties(index) for index in indices]
    return f"{num_ranks} on {describe_devices([(p.name, p.total_memory) for p in properties])}"


def describe_devices(devices: Sequence[tuple[str, int]]) -> str:
    """Formats (name, bytes of memory) of devices, and counts equal ones: "2 x Tesla T4 (14.7 GiB each)"."""
    counts = sorted((name, gib(num_bytes, 1), number) for (name, num_bytes), number in Counter(devices).items())
    return " and ".join(f"{n} x {name} ({size} each)" if n > 1 else f"{name} ({size})" for name, size, n in counts)


def start_sentence(identity: RankIdentity, config: MultiGPUConfig, log_dir: str | None) -> str:
    """Returns the sentence that a single process or rank 0 logs when `enable_multi_gpu` is in effect.

    Args:
        log_dir: Folder with the logs of ranks above 0; None if another launcher keeps them.
    """
    if identity.world_size > 1:
        logs = "" if log_dir is None else f"; ranks above 0 write to {log_dir}/rank_N.log"
        return describe_ranks(identity, config) + logs
    accelerator = None if config.device == "cpu" else find_accelerator()
    num_visible = 0 if accelerator is None else torch.get_device_module(accelerator).device_count()
    return describe_lone_process(num_visible, config, os.environ)
