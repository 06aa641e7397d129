"""The kinds of accelerator: by which backend their ranks meet, and which variables choose among the devices. Pure.

The one module that names them. NVIDIA's and AMD's cards are both "cuda" to torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of accelerator, as torch names it.

    Args:
        backend: The process group backend that moves its tensors.
        choosers: Variables that select the visible devices. If none is set, the last one is used.
    """

    backend: str
    choosers: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "cuda": Kind("nccl", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    "xpu": Kind("xccl", ("ZE_AFFINITY_MASK",)),
    "npu": Kind("hccl", ("ASCEND_RT_VISIBLE_DEVICES",)),
}
# Of the CPU, and of devices that have no backend of their own.
CPU_BACKEND = "gloo"
# By which users choose devices. AMD's second one counts the devices that the first one leaves.
CHOOSERS = ("ROCR_VISIBLE_DEVICES", *(name for kind in KINDS.values() for name in kind.choosers))
# Of Apple: torch finds it, but no process group does.
WITHOUT_GROUP = "mps"
# These leave a process no GPU, whatever looks for one.
HIDDEN: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    # oneAPI has no empty mask; this one leaves no GPU.
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
}
_KIND_OF = {kind.backend: name for name, kind in KINDS.items()}


def backend_of(device_type: str) -> str:
    """The process group backend that moves tensors of a device."""
    return KINDS[device_type].backend if device_type in KINDS else CPU_BACKEND


def kind_of(backend: str) -> str | None:
    """The kind of accelerator whose tensors a backend moves; None for one of the CPU."""
    return _KIND_OF.get(backend)


def only(kind: str, index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let a process see one device: "GPU-8932f937", or "5" of CUDA_VISIBLE_DEVICES="4,5".

    See `among`.
    """
    return among(kind, [index], environment)


def among(kind: str, indices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let a process see some devices.

    Args:
        kind: As torch names it.
        indices: Count the devices that `environment` shows.
        environment: This process's variables.

    Raises:
        IndexError: `environment` does not show one of the devices; its argument is the variable.
    """
    names = KINDS[kind].choosers
    shown = {name: environment[name].split(",") for name in names if environment.get(name)}
    if hiding := [name for name, entries in shown.items() if max(indices) >= len(entries)]:
        raise IndexError(hiding[0])
    chosen = {name: ",".join(entries[index].strip() for index in indices) for name, entries in shown.items()}
    return chosen or {names[-1]: ",".join(map(str, indices))}
