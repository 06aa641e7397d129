"""Probe: starts ranks as for a training. They all-reduce a tensor and check the sum."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, read_identity

if TYPE_CHECKING:
    import torch

_ELEMENT_BYTES = 4
_GPU_ELEMENTS = 256 * 2**20 // _ELEMENT_BYTES
_CPU_ELEMENTS = 16 * 2**20 // _ELEMENT_BYTES
_NUM_ROUNDS = 5
# Below 2^16, so that the sum over up to 254 ranks stays within 32 bits.
_MODULUS = 65521


def time_all_reduce(num_elements: int, device: torch.device) -> tuple[int, float]:
    """All-reduces a tensor of 32-bit integers several times. Collective.

    Returns the largest number of wrong elements of this rank in a round, and the median seconds of a round.
    """
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(num_elements, dtype=torch.int32, device=device) % _MODULUS
    expected = pattern * (world_size * (world_size + 1) // 2)
    num_wrong, seconds = 0, []
    for _ in range(1 + _NUM_ROUNDS):
        tensor = pattern * (rank + 1)
        dist.barrier()
        wait_for(device)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        wait_for(device)
        seconds.append(time.perf_counter() - start)
        num_wrong = max(num_wrong, int((tensor != expected).sum()))
    # The first round opens the connections.
    return num_wrong, statistics.median(seconds[1:])


def _measure_in_rank() -> None:
    import torch
    import torch.distributed as dist

    from unsloth_multigpu.group.manager import DDPManager, local_device
    from unsloth_multigpu.launch.rank import enter_rank

    # Without enable_multi_gpu(): an unsupported library is another row of the result, not a failure of the network.
    config, identity = MultiGPUConfig.resolve({}), read_identity(os.environ) or SINGLE_PROCESS
    enter_rank(identity, RunContext.read(os.environ))
    device = local_device(identity, config)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    manager = DDPManager(identity, config)
    manager.open_group()
    num_elements = _CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS
    mine = time_all_reduce(num_elements, device)
    # Through the store, because the collectives are what is tested.
    manager.publish(f"doctor/{identity.rank}", json.dumps(mine))
    if identity.rank == 0:
        limit_s = manager.config.timeout_s
        texts = [manager.wait_for(f"doctor/{r}", f"rank {r}", timeout_s=limit_s) for r in range(identity.world_size)]
        wrong, seconds = zip(*map(json.loads, texts), strict=True)
        num_bytes = num_elements * _ELEMENT_BYTES
        outcome = {
            "num_ranks": identity.world_size,
            "backend": str(dist.get_backend()),
            "device": device.type,
            "num_bytes": num_bytes,
            "seconds": max(seconds),
            "algorithm_gb_per_s": num_bytes / max(seconds) / 1e9,
            "num_wrong_by_rank": list(wrong),
        }
        Path(sys.argv[1]).write_text(json.dumps(outcome), encoding="utf-8")
    dist.destroy_process_group()


def with_several_ranks(config: MultiGPUConfig) -> MultiGPUConfig:
    """Sets two CPU ranks if `num_gpus` is not set, and the run would use no accelerator."""
    from unsloth_multigpu.start import visible_accelerators

    if config.num_gpus is None and (config.device == "cpu" or visible_accelerators()[1] == 0):
        return dataclasses.replace(config, num_gpus=2)
    return config


def _supervise_ranks() -> NoReturn:
    """Starts the ranks, and exits with their exit code. Does not return."""
    from unsloth_multigpu.start import ranks_to_start, supervise

    config = with_several_ranks(MultiGPUConfig.resolve({}))
    num_ranks = ranks_to_start(config)
    supervise([sys.executable, "-m", "unsloth_multigpu.tools.allreduce", sys.argv[1], "rank"], config, num_ranks)


def wait_for(*devices: torch.device) -> None:
    """Waits until all queued work of the devices is done."""
    import torch

    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def main() -> None:
    """`python -m unsloth_multigpu.tools.allreduce OUTCOME.json`; ranks have a second argument, `rank`."""
    from unsloth_multigpu.tools.probe import leave_outcome

    if sys.argv[2:] == ["rank"]:
        _measure_in_rank()
    else:
        leave_outcome(_supervise_ranks)


if __name__ == "__main__":
    main()
