"""Losses that compare each row of a micro-batch with all others: sentence-transformers can gather these from all ranks.

A part of the rows has another loss: it lacks the rest of the negatives. With `gather_across_devices` a rank compares
its own rows with the rows of all ranks. The mean over ranks is then the loss of the whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.trainer_protocol import TrainerLike

_SWITCH = "gather_across_devices"


def gathering_losses(trainer: TrainerLike) -> list[nn.Module]:
    """The trainer's loss modules that can gather rows from all ranks, also wrapped ones; [] for other trainers."""
    loss = getattr(trainer, "loss", None)
    found = [each for each in (loss.values() if isinstance(loss, dict) else [loss]) if isinstance(each, nn.Module)]
    return [module for each in found for module in each.modules() if _SWITCH in vars(module)]


@contextmanager
def gathering(losses: Sequence[nn.Module], is_on: bool) -> Iterator[None]:
    """Lets losses gather the rows of all ranks, which then meet in each forward and backward pass, or not."""
    with ExitStack() as stack:
        for loss in losses:
            stack.enter_context(instance_attribute(loss, _SWITCH, is_on))
        yield
