"""Probe: lists the accelerators that torch sees, cores and memory, and checks copies between the devices."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from unsloth_multigpu.accelerator import CHOOSERS, KINDS
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.tools.allreduce import wait_for
from unsloth_multigpu.tools.doctor.doctor_command import CheckRow
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import threads_of_each
from unsloth_multigpu.words import GIB, gib

if TYPE_CHECKING:
    import torch

COPY_BYTES = 64 * 2**20
_NUM_COPIES = 3
_NVIDIA_SMI_LIMIT_S = 20.0
# NCCL and DataLoader workers use shared memory, of which a Docker container has 64 MiB by default.
_MIN_SHARED_BYTES = GIB
_COPIES = "copies between devices"
_COPY_HINT = (
    "Set NCCL_P2P_DISABLE=1 for training. The cause is usually the IOMMU (turn off VT-d, AMD-Vi or ACS in the "
    "firmware) or a GPU whose driver has no P2P."
)


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

    from unsloth_multigpu.start import visible_accelerators

    kind, count = visible_accelerators()
    copies = check_copies([torch.device(kind, index) for index in range(count)])
    rows = [driver_row(), *device_rows(kind, count), line_row(), *host_rows(), *copy_rows(kind, copies)]
    return {"kind": kind, "rows": list(map(asdict, rows))}


def driver_row() -> CheckRow:
    """Describes the driver, and the platform that torch was built for."""
    import torch

    driver, num_known = _nvidia_driver()
    # Each is None in a build for the CPU.
    built = {"ROCm": torch.version.hip, **{name.upper(): getattr(torch.version, name, None) for name in KINDS}}
    built_for = next((f"{name} {version}" for name, version in built.items() if version), "the CPU")
    text, facts = f"NVIDIA driver {driver}, torch was built for {built_for}", {"driver": driver if num_known else None}
    return CheckRow("devices", "driver", "ok" if num_known else "note", text, facts=facts)


def device_rows(kind: str, count: int) -> Iterator[CheckRow]:
    """Lists the visible accelerators of a kind."""
    import torch

    for index in range(count):
        module = getattr(torch, kind)
        free_bytes, total_bytes = module.mem_get_info(index)
        name = module.get_device_properties(index).name
        text = f"{name}, {gib(total_bytes, 1)}, {gib(free_bytes, 1)} free"
        facts = {"name": name, "free_bytes": free_bytes, "total_bytes": total_bytes}
        yield CheckRow("devices", f"{kind}:{index}", "ok", text, facts=facts)
    _, num_known = _nvidia_driver()
    if not count and num_known and not os.environ.keys() & set(CHOOSERS):
        text = f"nvidia-smi lists {num_known}, torch {installed_version('torch')} sees none"
        hint = "Install a torch build for CUDA and this driver: https://pytorch.org/get-started/locally"
        yield CheckRow("devices", "gpu", "FAIL", text, hint)
    elif not count:
        yield CheckRow("devices", "gpu", "note", "none visible, ranks would run on the CPU")


def line_row() -> CheckRow:
    """Returns what `enable_multi_gpu()` would log on this machine, or why it would raise, with the hint."""
    import torch

    from unsloth_multigpu.group.place import start_sentence
    from unsloth_multigpu.start import ranks_to_start

    config = MultiGPUConfig.resolve({})
    try:
        num_ranks = ranks_to_start(config)
    except SetupError as error:
        return CheckRow("devices", "line", "FAIL", f"enable_multi_gpu() would raise: {error.args[0]}", error.hint)
    torch.set_num_threads(threads_of_each(num_ranks))
    world_size = num_ranks * config.nnodes
    identity = RankIdentity(0, 0, world_size, num_ranks, "unsloth_multigpu")
    return CheckRow("devices", "line", "ok", start_sentence(identity, config, None))


def host_rows() -> Iterator[CheckRow]:
    """Lists cores and memory."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield CheckRow("devices", "cpu", "ok", f"{num_cores} cores", facts={"num_cores": num_cores})
    memory = psutil.virtual_memory()
    text = f"{gib(memory.total, 1)}, {gib(memory.available, 1)} available"
    facts = {"total_bytes": memory.total, "available_bytes": memory.available}
    yield CheckRow("devices", "memory", "ok", text, facts=facts)
    shared = Path("/dev/shm")
    if shared.exists():
        free_bytes = shutil.disk_usage(shared).free
        is_small = free_bytes < _MIN_SHARED_BYTES
        hint = "In a container: docker run --ipc=host, or --shm-size=8g." if is_small else ""
        facts, text = {"free_bytes": free_bytes}, f"{gib(free_bytes, 1)} free"
        yield CheckRow("devices", "/dev/shm", "note" if is_small else "ok", text, hint, facts)


def copy_rows(kind: str, copies: Sequence[dict[str, Any]]) -> Iterator[CheckRow]:
    """Judges the result of `check_copies` between accelerators of a kind."""
    peers = {True: "peer access", False: "no peer access, through the host", None: "peer access not known"}
    for pair in copies:
        name = f"{kind}:{pair['source']} -> {kind}:{pair['target']}"
        num_bytes, peer = pair["num_bytes"], peers[pair["has_peer_access"]]
        speed = f"{num_bytes / 2**20:g} MiB at {pair['gb_per_s']:.1f} GB/s, {peer}"
        if wrong := pair["num_wrong_bytes"]:
            text = f"{wrong} of {num_bytes} bytes arrived wrong; {speed}"
            yield CheckRow(_COPIES, name, "FAIL", text, _COPY_HINT, pair)
        else:
            yield CheckRow(_COPIES, name, "ok", f"every bit arrived; {speed}", facts=pair)
    if not copies:
        yield CheckRow(_COPIES, "pairs", "note", "fewer than two devices, nothing to copy")


def _nvidia_driver() -> tuple[str, int]:
    """Returns the version of the driver and the number of its GPUs; without a driver, what nvidia-smi says, and 0."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return "none", 0
    lines = done.stdout.splitlines()
    return (lines[0], len(lines)) if lines and not done.returncode else (": ".join(["none", *lines]), 0)


if __name__ == "__main__":
    from unsloth_multigpu.tools.probe import leave_outcome

    leave_outcome(_measure)
