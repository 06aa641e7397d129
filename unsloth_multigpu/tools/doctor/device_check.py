"""Probe: lists the accelerators that torch sees, and checks that copies between them are correct."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.tools.allreduce import wait_for
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import threads_of_each

if TYPE_CHECKING:
    import torch

COPY_BYTES = 64 * 2**20
_NUM_COPIES = 3


def check_copies(
    devices: Sequence[torch.device],
    num_bytes: int = COPY_BYTES,
    copy: Callable[[torch.Tensor, torch.Tensor], object] = lambda target, source: target.copy_(source),
) -> list[dict[str, Any]]:
    """Copies random bytes between every ordered pair of devices, and compares the results on the host.

    Some consumer GPUs and some IOMMU settings deliver garbage without an error. torch's own copy is direct if the
    driver allows it. The CPU may be given several times.

    Returns:
        For each pair: `source` and `target`, indices of devices; `num_bytes` of one copy; `num_wrong_bytes`, the
        largest number of wrong bytes of a copy; `gb_per_s` of the fastest copy, in 10^9 bytes; and `has_peer_access`
        between the two devices, None = not known.
    """
    import torch

    found = []
    for source, target in itertools.permutations(range(len(devices)), 2):
        here, there = devices[source], devices[target]
        # Different bytes for each pair, so that data of an earlier pair cannot be mistaken for this one's.
        generator = torch.Generator().manual_seed(1000 * source + target)
        data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
        original, arrived = data.to(here), torch.empty_like(data, device=there)
        most_wrong, seconds = 0, float("inf")
        for _ in range(_NUM_COPIES):
            # Every byte of the target is wrong before the copy.
            arrived.copy_(~data)
            wait_for(here, there)
            start = time.perf_counter()
            copy(arrived, original)
            wait_for(here, there)
            seconds = min(seconds, time.perf_counter() - start)
            most_wrong = max(most_wrong, int((arrived.cpu() != data).sum()))
        pair = {"source": source, "target": target, "num_bytes": num_bytes, "num_wrong_bytes": most_wrong}
        # In torch's order of arguments.
        peers = torch.cuda.can_device_access_peer(here, there) if {here.type, there.type} == {"cuda"} else None
        found.append({**pair, "gb_per_s": num_bytes / seconds / 1e9, "has_peer_access": peers})
    return found


def _measure() -> dict[str, Any]:
    import torch

    from unsloth_multigpu.accelerator import KINDS
    from unsloth_multigpu.start import visible_accelerators

    kind, count = visible_accelerators()
    described = []
    for index in range(count):
        module = getattr(torch, kind)
        free_bytes, total_bytes = module.mem_get_info(index)
        name = module.get_device_properties(index).name
        described.append({"name": name, "free_bytes": free_bytes, "total_bytes": total_bytes})
    return {
        "kind": kind,
        # Versions of the platforms that torch was built for; None in a build for the CPU.
        **{name: getattr(torch.version, name, None) for name in KINDS},
        "rocm": torch.version.hip,
        "devices": described,
        "copies": check_copies([torch.device(kind, index) for index in range(count)]),
        **_line(),
    }


def _line() -> dict[str, str]:
    """Returns what `enable_multi_gpu()` would log on this machine, or why it would raise, with the hint."""
    import torch

    from unsloth_multigpu.group.place import start_sentence
    from unsloth_multigpu.start import ranks_to_start

    config = MultiGPUConfig.resolve({})
    try:
        num_ranks = ranks_to_start(config)
    except SetupError as error:
        return {"line": "", "refused": f"enable_multi_gpu() would raise: {error.args[0]}", "hint": error.hint}
    torch.set_num_threads(threads_of_each(num_ranks))
    world_size = num_ranks * config.nnodes
    identity = RankIdentity(0, 0, world_size, num_ranks, "unsloth_multigpu")
    return {"line": start_sentence(identity, config, None), "refused": "", "hint": ""}


if __name__ == "__main__":
    from unsloth_multigpu.tools.probe import leave_outcome

    leave_outcome(_measure)
