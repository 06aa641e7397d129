"""Which devices the slots have, what a slot's process sees, and which client is the next one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsloth_multigpu.accelerator import HIDDEN, KINDS, among
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.start import visible_accelerators
from unsloth_multigpu.wire.process import threads_of_each

# Variables of launchers for ranks: with these a Trainer in a slot would look for other ranks.
_OF_RANKS = {"GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
_OF_LAUNCHERS = (ENV_PREFIX, "GROUP_WORLD_", "OMPI_COMM_", "PMI_", "PMIX_", "ROLE_", "TORCHELASTIC_")
_NO_DEVICE = {**HIDDEN, "ACCELERATE_USE_CPU": "true"}


@dataclass(frozen=True)
class SlotDevice:
    """A device of `accelerator.KINDS` by its index among the visible ones; "cpu" slots are numbered likewise."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def choose_devices(num_gpus: int | None, device: str | None = None, *, auto_gpu: bool = True) -> list[SlotDevice]:
    """Returns the devices for clients, each once. Opens none of them. Raises SetupError if fewer are visible.

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
    return [SlotDevice(kind, index) for index in range(first, first + num_asked)]


def slot_environment(device: SlotDevice, num_slots: int, seed: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a slot's process, which show it one device and no launcher.

    `num_slots` slots share the machine's cores; `seed` is PYTHONHASHSEED, equal in all of them. Raises SetupError if
    `environment`, that of this process, does not show the device.
    """
    defaults = {"OMP_NUM_THREADS": str(threads_of_each(num_slots)), "PYTHONHASHSEED": str(seed)}
    given = {name: value for name, value in environment.items() if value or name not in defaults}
    of_ranks = {name for name in given if name in _OF_RANKS or name.startswith(_OF_LAUNCHERS)}
    own = defaults | {name: value for name, value in given.items() if name not in of_ranks}
    try:
        return own | (_NO_DEVICE if device.kind == "cpu" else among(device.kind, [device.index], environment))
    except IndexError as hiding:
        name = str(hiding)
        raise SetupError(
            f"{device} was chosen, but {name}={environment[name]!r} does not show it.",
            hint=f"Do not change {name} after torch has counted the devices.",
        ) from hiding


def longest_first(client_ids: Sequence[int], seconds: Mapping[int, float]) -> list[int]:
    """Returns the indices of `client_ids` by the time of the client's last run. Without one it counts as the mean.

    On devices of equal speed the last client then ends within 4/3 of the optimal time (Graham 1969, "Bounds on
    Multiprocessing Timing Anomalies").
    """
    mean_s = sum(seconds.values()) / len(seconds) if seconds else 0.0
    return sorted(range(len(client_ids)), key=lambda n: -seconds.get(client_ids[n], mean_s))
