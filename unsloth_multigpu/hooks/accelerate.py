"""Patches of accelerate and PEFT, for the devices of ranks and for scripts with an `Accelerator` of their own."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.patching import Patch

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

logger = get_logger(__name__)

_SUPPORTS = "accelerate>=1.4"
_SKIPPED = ("accelerate.", "unsloth_multigpu.")  # Modules whose frames are not the caller of `Accelerator()`.
_INFERS_DEVICE = ("peft.peft_model:infer_device", "peft.utils.save_and_load:infer_device")


def device_patches(device_type: str, device_index: int, local_rank: int) -> list[Patch]:
    """Returns patches of accelerate's state and PEFT's loading for ranks on CUDA or XPU devices; none for CPU ranks.

    Args:
        device_type: "cuda", "xpu" or "cpu".
        device_index: Index of the rank's device among its visible devices.
        local_rank: Rank within its machine.
    """
    if device_type == "cpu":
        return []
    patches = []
    if device_type == "cuda":
        patches.append(Patch("accelerate.state:check_cuda_p2p_ib_support", _SUPPORTS, _set_nccl, optional=True))
    if device_index != local_rank:
        barrier = functools.partial(_barrier_on_device, device_index)
        patches.append(Patch("accelerate.state:PartialState.wait_for_everyone", _SUPPORTS, barrier))
    if device_index > 0:
        with_index = functools.partial(_device_with_index, device_index)
        patches += [Patch(target, "peft>=0.18", with_index, optional=True) for target in _INFERS_DEVICE]
    return patches


def loop_patches(config: MultiGPUConfig, manager: Callable[[], DDPManager], on_close: ExitStack) -> list[Patch]:
    """Returns the patch with which a script's own loop with an `Accelerator` takes the steps of one process.

    `on_close` restores the `Accelerator` objects when it is closed.
    """
    told: set[str] = set()

    def steered(original: Callable[..., None], accelerator: Any, /, *args: Any, **kwargs: Any) -> None:
        """Makes a script's own training loop with an Accelerator take the steps of one process."""
        manager().meet_ranks()  # accelerate opens the process group next, and its error would not name a missing rank.
        original(accelerator, *args, **kwargs)
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
        caller = next((frame for frame in frames if not _module_of(frame).startswith(_SKIPPED)), None)
        if caller is not None and not _is_of_trainer(caller):
            from unsloth_multigpu.step.accelerated import steer_loop

            on_close.callback(steer_loop(accelerator, config, manager, told, _module_of(caller)))

    patch = Patch("accelerate.accelerator:Accelerator.__init__", _SUPPORTS, steered)
    return [patch] if config.keeps_global_batch else []


def _is_of_trainer(caller: FrameType) -> bool:
    """True if a method of a Trainer is running: a Trainer's steps are chosen elsewhere."""
    trainer_class: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", ())
    return any(isinstance(frame.f_locals.get("self"), trainer_class) for frame, _ in traceback.walk_stack(caller))


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _set_nccl(original: Callable[..., bool], /, *args: Any, **kwargs: Any) -> bool:
    """Sets the NCCL variables that some GPUs need: accelerate requires them, and only its launcher sets them."""
    is_supported = original(*args, **kwargs)
    missing = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ]
    if not is_supported and missing:
        # Set before the first collective, when NCCL reads them.
        os.environ.update(dict.fromkeys(missing, "1"))
        logger.warning(
            "this driver has no peer-to-peer access between these GPUs: set %s. Gradients go through host memory; a "
            "newer driver (550.40 for the RTX 40 series) is faster",
            " ".join(f"{name}=1" for name in missing),
        )
    return is_supported


def _barrier_on_device(device_index: int, original: Callable[..., None], /, self: Any) -> None:
    """Makes a barrier use the rank's device. The original takes the local rank as index, also for one visible card."""
    if not self.use_distributed:
        original(self)
        return
    import torch.distributed as dist

    dist.barrier(device_ids=[device_index])


def _device_with_index(device_index: int, original: Callable[[], str], /) -> str:
    """Returns the rank's device with its index. For "cuda", safetensors would load on "cuda:0" in all ranks."""
    return f"{original()}:{device_index}"
