"""How the ranks' gradients meet where DDP does not do it: the contract that each strategy keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unsloth_multigpu.sync.bucket import buckets, flatten, num_bytes, unflatten_into

_MIB = 2**20
DEFAULT_BUCKET_MB = 25.0


class GradientSync:
    """One way to train one model on all ranks of the default process group.

    A loop calls `begin` once, then for every optimizer step `after_backward` when the rank's gradients of the whole
    step are in `.grad` and not yet clipped, and `after_step` when the optimizer has stepped; `meet` before weights
    are saved, evaluated or compared; and `end`. All ranks make the same calls in the same order: each may be a
    collective. Gradients are averaged over the ranks, as DDP does.

    Args:
        model: The model without a wrapper. Its trainable parameters are kept together, and its buffers.
        optimizer: This rank's torch optimizer, on those parameters.

    Attributes:
        sent_bytes: What this rank has sent so far: elements of tensors, in the algorithms that are usual.
        num_steps: Finished optimizer steps of this rank.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [b for b in model.buffers() if b is not None]
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.sent_bytes = 0
        self.num_steps = 0

    def begin(self) -> None:
        """Gives every rank rank 0's weights and buffers, frozen ones included, as DDP does."""
        self.broadcast([*self.model.parameters(), *self.buffers])

    def after_backward(self) -> None:
        """The gradients of this rank's part of the step are whole."""

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self.num_steps += 1

    @property
    def are_replicas_equal(self) -> bool:
        """True if the weights of all ranks are equal now. Between `after_step` and the next backward."""
        return True

    def meet(self) -> None:
        """Makes weights and buffers of all ranks equal."""

    def end(self) -> None:
        """Meets for the last time, and leaves model and optimizer as ordinary ones."""
        self.meet()

    def abort(self) -> None:
        """Lets go of threads and hooks after an error, without another rank. `end` needs no `abort`."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of rank 0 beside weights and optimizer: tensors, numbers, texts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict()`. Called after `begin`, when the weights are those of the checkpoint."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Gives every rank rank 0's values. Collective."""
        for group in buckets(tensors, int(DEFAULT_BUCKET_MB * _MIB)):
            flat = flatten(group)
            dist.broadcast(flat, src=0)
            unflatten_into(group, flat)
            # A chain or a tree: as many copies travel as there are other ranks, one from each rank but the last.
            self.sent_bytes += num_bytes(flat) if self.rank < self.world_size - 1 else 0
