"""The kinds of accelerators: their process group backends, and the variables that select visible devices. Pure.

The only module that names them. NVIDIA's and AMD's GPUs are both "cuda" to torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
_KIND_OF = {kind.backend: name for name, kind in KINDS.items()}


def backend_of(device_type: str) -> str:
    """Returns the process group backend for tensors of a device type."""
    return KINDS[device_type].backend if device_type in KINDS else CPU_BACKEND


def kind_of(backend: str) -> str | None:
    """Returns the kind of accelerator that a backend is for; None for a CPU backend."""
    return _KIND_OF.get(backend)


def among(kind: str, indices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
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
