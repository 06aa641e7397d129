"""Ranks that train by themselves because nothing has made a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)


def warn_of_lone_steps() -> Any:
    """Says so if an optimizer makes its first step before there is a process group: each rank trains by itself.

    Returns:
        The handle of torch's hook; `remove()` ends the watch.
    """

    def look(*_: Any) -> None:
        handle.remove()
        if not dist.is_initialized():
            logger.warning(
                "an optimizer makes a step, and there is no process group: every rank trains by itself and nothing is "
                "shared. Use a Trainer, or wrap_model_multi_gpu"
            )

    handle = register_optimizer_step_pre_hook(look)
    return handle
