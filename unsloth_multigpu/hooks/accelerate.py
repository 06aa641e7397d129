"""Corrects what accelerate assumes about devices and about the program that started the ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.patching import Patch

logger = get_logger(__name__)

_SUPPORTS = "accelerate>=1.4"


def device_patches(device_type: str, device_index: int, local_rank: int) -> list[Patch]:
    """Patches of accelerate's state for ranks on accelerators; none for CPU ranks.

    Args:
        device_type: "cuda", "xpu" or "cpu".
        device_index: Index of the rank's device among those that it sees.
        local_rank: Place of this rank on its machine.
    """
    patches = []
    if device_type == "cuda":
        patches.append(
            Patch(
                target="accelerate.state:check_cuda_p2p_ib_support",
                supports=_SUPPORTS,
                wrap=_checked,
                reason="Where cards and driver cannot do without them, accelerate's launcher sets two variables of "
                "NCCL, and ranks of other launchers are refused.",
                optional=True,
            )
        )
    if device_type != "cpu" and device_index != local_rank:
        patches.append(
            Patch(
                target="accelerate.state:PartialState.wait_for_everyone",
                supports=_SUPPORTS,
                wrap=functools.partial(_met, device_index),
                reason="Its barrier uses the device whose index is the local rank. A rank that sees one card "
                "has no such device.",
            )
        )
    return patches


def _checked(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def check_cuda_p2p_ib_support(*args: Any, **kwargs: Any) -> bool:
        is_supported = original(*args, **kwargs)
        missing = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ]
        if not is_supported and missing:
            # Set before the first collective, when NCCL reads them.
            os.environ.update(dict.fromkeys(missing, "1"))
            logger.warning(
                "this driver cannot connect these GPUs directly: %s. Gradients go through the host; a newer driver "
                "(550.40 for the RTX 40 series) is faster",
                " ".join(f"{name}=1" for name in missing),
            )
        return is_supported

    return check_cuda_p2p_ib_support


def _met(device_index: int, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def wait_for_everyone(self: Any) -> None:
        if not self.use_distributed:
            original(self)
            return
        import torch.distributed as dist

        dist.barrier(device_ids=[device_index])

    return wait_for_everyone
