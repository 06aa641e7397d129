"""CUDA devices in host memory: what tests use to run the device path without a card.

A CPU build of torch gets real CUDA tensors on up to 16 devices, and a process group "nccl". Placement, errors of mixed
devices, DDP's reducer, autocast, the gradient scaler, pinned memory, streams and events are torch's own code; operators
compute on the CPU. `device.cpp` is the device, `nccl.cpp` the collectives, `cuda.py` what `torch._C` lacks.

    run = run_python([script], tmp_path, {**PLAIN, **cards(2)})

What it has as a card has: memory that the host cannot touch (see `cards`), counted for each device, with a limit;
generators of its own; collectives that run behind the host's back; one card per rank. What it has not: speed, kernels
(Triton's are interpreted), overlap of streams, torch.compile, a driver (nvidia-smi), NCCL's transports.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.fake_cuda.build import built, why_not

# What `torch.cuda.nccl.version()` says: several ranks may share a card.
NCCL_VERSION = (2, 30, 3)
needs_device = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def cards(
    visible: int | str = 2,
    *,
    of: int | None = None,
    capability: str = "7.5",
    memory: str = "",
    report: Path | str = "",
    guarded: bool = False,
) -> dict[str, str]:
    """Variables of a process that has CUDA devices in host memory.

    Args:
        visible: How many are visible, or their numbers, as in CUDA_VISIBLE_DEVICES.
        of: How many the machine has; None = the visible ones.
        capability: Of all devices. "7.5" is a T4, which has no bfloat16; "8.0", "9.0".
        memory: Bytes of each device, or "NUMBER=BYTES" for one of them, separated by commas; 16 GiB by default.
        report: Each process writes what it did with the devices into this file's name with ".PID" behind, at its end.
        guarded: The host cannot touch the memory, also where the processor has no protection keys. Each operator makes
            two calls of the system for it then.
    """
    numbers = ",".join(map(str, range(visible))) if isinstance(visible, int) else visible
    count = of if of is not None else max((int(n) for n in numbers.split(",") if n.isdigit()), default=-1) + 1
    found = {
        "FAKE_CUDA": str(built()),
        "FAKE_CUDA_DEVICES": str(count),
        "FAKE_CUDA_CAPABILITY": capability,
        "CUDA_VISIBLE_DEVICES": numbers,
    }
    if memory:
        found["FAKE_CUDA_MEMORY"] = memory
    if report:
        found["FAKE_CUDA_REPORT"] = os.fspath(report)
    if not guarded and not has_protection_keys():
        found["FAKE_CUDA_UNPROTECTED"] = "1"
    return found


@functools.cache
def has_protection_keys() -> bool:
    """Of this machine's processor: access to memory is a right of each thread then, which costs nothing."""
    file = Path("/proc/cpuinfo")
    return file.exists() and " ospke" in file.read_text()


@dataclass(frozen=True)
class Report:
    """What a process did with the devices.

    Args:
        rank: The value of RANK; "" = it was none.
        opened: Numbers of the devices that it opened.
        peak_bytes: Of each visible device.
        waits: How often the host waited for a device, as (kind, "file:line function", count).
    """

    rank: str
    opened: list[int]
    peak_bytes: list[int]
    waits: list[tuple[str, str, int]]


def reports(path: Path) -> list[Report]:
    """Of the processes that were ranks, in the order of ranks."""
    files: Iterable[Path] = path.parent.glob(f"{path.name}.*")
    found = [Report(**json.loads(file.read_text())) for file in files]
    return sorted((report for report in found if report.rank), key=lambda report: int(report.rank))
