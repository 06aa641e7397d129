"""Which device does a slot get, and which environment makes it the only one that the slot sees?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unsloth_multigpu.accelerator import HIDDEN, KINDS, only
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.start import visible_accelerators
from unsloth_multigpu.wire.process import threads_of_each

# By which launchers tell a process that it is one of several: a Trainer in a slot would look for the others.
_OF_RANKS = {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
_OF_LAUNCHERS = (ENV_PREFIX, "GROUP_WORLD_", "OMPI_COMM_", "PMI_", "PMIX_", "ROLE_", "TORCHELASTIC_")
_NO_DEVICE = {**HIDDEN, "ACCELERATE_USE_CPU": "true"}


@dataclass(frozen=True)
class SlotDevice:
    """A device of `accelerator.KINDS` by its place among the visible ones; "cpu" slots count as if each had one."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def choose_devices(num_gpus: int | None, device: str | None = None, *, auto_gpu: bool = True) -> list[SlotDevice]:
    """Devices on which clients run, each once. Opens none of them; raises SetupError for more than there are.

    Args:
        num_gpus: How many of the visible ones; None = all. Where none is visible, how many CPU slots; None = one.
        device: Without `auto_gpu` the one to use, as torch names it; None = the first visible one, else the CPU.
    """
    kind, num_visible = visible_accelerators()
    if kind not in KINDS:  # There is no variable that hides all but one.
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
            f"{kind}:{first + num_asked - 1} is to be used, but {num_visible} {kind} device(s) are visible.",
            hint="Lower num_gpus, set clients_per_gpu for several clients at once on one, or look at "
            "CUDA_VISIBLE_DEVICES, the driver and the installed torch.",
        )
    return [SlotDevice(kind, index) for index in range(first, first + num_asked)]


def slot_environment(device: SlotDevice, num_slots: int, seed: int, environment: Mapping[str, str]) -> dict[str, str]:
    """All variables of a slot's process: before its program starts it sees one device, and nothing of other ranks.

    Args:
        num_slots: How many share the machine's cores.
        seed: Of the order in sets of texts, which is the same in all slots.
        environment: This process's; raises SetupError where it does not show the device.
    """
    defaults = {"OMP_NUM_THREADS": str(threads_of_each(num_slots)), "PYTHONHASHSEED": str(seed)}
    given = {name: value for name, value in environment.items() if value or name not in defaults}
    of_ranks = {name for name in given if name in _OF_RANKS or name.startswith(_OF_LAUNCHERS)}
    own = defaults | {name: value for name, value in given.items() if name not in of_ranks}
    try:
        return own | (_NO_DEVICE if device.kind == "cpu" else only(device.kind, device.index, environment))
    except IndexError as hiding:
        name = str(hiding)
        raise SetupError(
            f"{device} is to be used, but {name}={environment[name]!r}.",
            hint=f"Do not change {name} after torch has counted the devices.",
        ) from hiding
