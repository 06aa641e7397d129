"""How many bytes DDP sends."""

from __future__ import annotations

from torch import nn

from unsloth_multigpu.group.bucket import all_reduce_bytes, num_bytes
from unsloth_multigpu.group.manager import DDPManager


def ddp_sent_bytes(model: nn.Module, manager: DDPManager, num_steps: int) -> int | None:
    """Bytes that this rank has sent in a training of `num_steps` steps; see `RankReport`."""
    compression, identity = manager.config.grad_compression, manager.identity
    if compression == "powersgd":
        return None
    trained = [p for p in model.parameters() if p.requires_grad]
    size = num_bytes(*trained) if compression is None else 2 * sum(p.numel() for p in trained)
    # DDP gives every rank rank 0's weights first, and its buffers in each step.
    first, buffers = num_bytes(*model.parameters(), *model.buffers()), num_bytes(*model.buffers())
    followed = first + num_steps * buffers if identity.rank < identity.world_size - 1 else 0
    return followed + num_steps * all_reduce_bytes(size, identity.world_size)
