"""Which devices the slots have, and what a slot's process sees."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unsloth_multigpu.accelerator import HIDDEN, KINDS, among
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.start import visible_accelerators
from unsloth_multigpu.wire.process import threads_of_each

# Variables of launchers for ranks: with these a Trainer in a slot would look for other ranks.
_OF_RANKS = {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
_OF_LAUNCHERS = (ENV_PREFIX, "GROUP_WORLD_", "OMPI_COMM_", "PMI_", "PMIX_", "ROLE_", "TORCHELASTIC_")
_NO_DEVICE = {**HIDDEN, "ACCELERATE_USE_CPU": "true"}


def choose_devices(num_gpus: int | None, device: str | None = None, *, auto_gpu: bool = True) -> list[torch.device]:
    """Returns the devices for clients, each once; "cpu" slots are numbered likewise. Opens none of them.

    Raises SetupError if fewer are visible.

    Args:
        num_gpus: Number of visible devices to use; None = all. Without a visible device, number of CPU slots; None = 1.
        device: The device to use without `auto_gpu`, as torch names it; None = the first visible one, else the CPU.
    """
    kind, num_visible = visible_accelerators()
    if kind not in KINDS:  # No variable can hide all devices but one.
        kind, num_visible = "cpu", 0
    first, num_asked = 0, num_gpus or num_visible or 1
    if not auto_gpu:
        if num_gpus is not None:
            raise SetupError(f"auto_gpu=False, but num_gpus={num_gpus}.", hint="Set auto_gpu=True, or device alone.")
        asked_kind, _, index = (device or kind).partition(":")
        kind, num_visible = (kind, num_visible) if asked_kind == kind else (asked_kind, 0)
        first, num_asked = (0 if kind == "cpu" else int(index or 0)), 1
    if kind != "cpu" and first + num_asked > num_visible:
        raise SetupError(
            f"{kind}:{first + num_asked - 1} was requested, but {num_visible} {kind} device(s) are visible.",
            hint="Lower num_gpus, set clients_per_gpu to run several clients on one device, or check "
            "CUDA_VISIBLE_DEVICES, the driver and the installed torch.",
        )
    return [torch.device(kind, index) for index in range(first, first + num_asked)]


def slot_environment(device: torch.device, num_slots: int, seed: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a slot's process, which show it one device and no launcher.

    `num_slots` slots share the machine's cores; `seed` is PYTHONHASHSEED, equal in all of them. Raises SetupError if
    `environment`, that of this process, does not show the device.
    """
    defaults = {"OMP_NUM_THREADS": str(threads_of_each(num_slots)), "PYTHONHASHSEED": str(seed)}
    given = {name: value for name, value in environment.items() if value or name not in defaults}
    of_ranks = {name for name in given if name in _OF_RANKS or name.startswith(_OF_LAUNCHERS)}
    own = defaults | {name: value for name, value in given.items() if name not in of_ranks}
    try:
        return own | (_NO_DEVICE if device.type == "cpu" else among(device.type, [device.index], environment))
    except IndexError as hiding:
        name = str(hiding)
        raise SetupError(
            f"{device} was chosen, but {name}={environment[name]!r} does not show it.",
            hint=f"Do not change {name} after torch has counted the devices.",
        ) from hiding
