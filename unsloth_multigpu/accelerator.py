"""The kinds of accelerators: process group backends, variables that select devices, settings of the allocator. Pure.

The only module that names them. NVIDIA's and AMD's GPUs are both "cuda" to torch.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsloth_multigpu.versions import installed_version


@dataclass(frozen=True)
class Kind:
    """A kind of accelerator, as torch names it.

    Args:
        backend: The process group backend for its tensors.
        choosers: Variables that select the visible devices. If none is set, the last one is used.
    """

    backend: str
    choosers: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "cuda": Kind("nccl", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    "xpu": Kind("xccl", ("ZE_AFFINITY_MASK",)),
    "npu": Kind("hccl", ("ASCEND_RT_VISIBLE_DEVICES",)),
}
# Backend of the CPU, and of devices without a backend of their own.
CPU_BACKEND = "gloo"
# All variables that select devices. On AMD, HIP_VISIBLE_DEVICES counts the devices that ROCR_VISIBLE_DEVICES leaves.
CHOOSERS = ("ROCR_VISIBLE_DEVICES", *(name for kind in KINDS.values() for name in kind.choosers))
# Apple's devices: known to torch, but no process group supports them.
WITHOUT_GROUP = "mps"
# Variables that hide all GPUs from a process.
HIDDEN: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    # oneAPI has no empty mask; this one leaves no GPU.
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
}
# Variables of torch's CUDA allocator. An empty value counts as set.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
# Unsloth's value for versions of torch that read PYTORCH_CUDA_ALLOC_CONF.
_ROUNDED = f"{_EXPANDABLE},roundup_power2_divisions:[32:256,64:128,256:64,>:32]"


def backend_of(device_type: str) -> str:
    """Returns the process group backend for tensors of a device type."""
    return KINDS[device_type].backend if device_type in KINDS else CPU_BACKEND


def kind_of(backend: str) -> str | None:
    """Returns the kind of accelerator that a backend is for; None for a CPU backend."""
    return next((name for name, kind in KINDS.items() if kind.backend == backend), None)


def variables_for(kind: str, indices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that show a process only some of the devices that `environment` shows, by their indices there.

    Such as "5" for index 1 of CUDA_VISIBLE_DEVICES="4,5".

    Raises:
        IndexError: One of them is not shown. Its argument is the name of the variable.
    """
    names = KINDS[kind].choosers
    shown = {name: environment[name].split(",") for name in names if environment.get(name)}
    if hiding := [name for name, entries in shown.items() if max(indices) >= len(entries)]:
        raise IndexError(hiding[0])
    chosen = {name: ",".join(entries[index].strip() for index in indices) for name, entries in shown.items()}
    return chosen or {names[-1]: ",".join(map(str, indices))}


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns Unsloth's settings of the allocator; empty if Unsloth is not installed or sets none, or the user did.

    `import unsloth` sets them before it imports torch. In a rank, `enable_multi_gpu()` has opened the device before,
    which reads the settings once. Without them a script that just fits on one GPU could run out of memory on two.
    """
    torch_version = installed_version("torch")
    if installed_version("unsloth_zoo") is None or torch_version is None:
        return {}
    if any(name in environment for name in ALLOCATOR_VARIABLES) or environment.get("UNSLOTH_VLLM_STANDBY", "0") != "0":
        return {}
    # ROCm and WSL have no expandable segments. Containers on WSL share its kernel.
    if "+rocm" in torch_version or "microsoft" in platform.release().lower():
        return {}
    numbers = [int(number) for number in re.findall(r"\d+", torch_version)[:2]]
    return {"PYTORCH_ALLOC_CONF": _EXPANDABLE} if numbers >= [2, 10] else {"PYTORCH_CUDA_ALLOC_CONF": _ROUNDED}
