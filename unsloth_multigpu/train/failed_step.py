"""Describes a step that failed: its gradient is not finite, or there was not enough memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.shards import has_shards, part_of
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.step.out_of_memory import advice, explain, filled, is_out_of_memory
from unsloth_multigpu.train.check import values_of
from unsloth_multigpu.words import listed

_MAX_NAMED = 3


def not_finite(
    trainer: TrainerLike, manager: DDPManager, losses: Sequence[torch.Tensor], norm: float, *, is_shared: bool
) -> str:
    """Describes, in one line, the present step, whose gradient norm is not finite.

    Args:
        losses: This rank's loss of each micro-batch.
        is_shared: All ranks have this gradient, and call this: it is a collective.
    """
    values, rank = [float(loss) for loss in losses], manager.identity.rank
    mine = [(i, str(value)) for i, value in enumerate(values) if not math.isfinite(value)]
    ranks = dict(enumerate(manager.gather_json(mine))) if is_shared else {rank: mine}
    fact = f"step {trainer.state.global_step + 1}: gradient norm is {norm}"
    found = [f"loss of rank {r}, micro-batch {i}, was {value}" for r, its in ranks.items() for i, value in its]
    if found:
        return f"{fact}; {listed(found, _MAX_NAMED, '; ')}"
    fact += "; all losses were finite" if len(ranks) > 1 else f"; the losses of rank {rank} were finite"
    # Of a gradient that is divided among the ranks, this rank's part.
    gradients = [(name, part_of(p.grad)) for name, p in trainer.model.named_parameters() if p.grad is not None]
    names = [name for name, gradient in gradients if not values_of(gradient).isfinite().all()]
    if names:
        return f"{fact}, not so the gradient of {listed(names, _MAX_NAMED)}"
    return fact if has_shards(trainer.model) else f"{fact}, and its sum of squares overflows"


def explain_memory(
    error: BaseException, trainer: TrainerLike, manager: DDPManager, place: str, *, is_evaluation: bool
) -> None:
    """Adds to an error for lack of memory where that was, what memory holds, and what to set. Leaves others alone."""
    if not is_out_of_memory(error):
        return
    args, model = trainer.args, trainer.model
    parameters = list(model.parameters())
    states = getattr(trainer.optimizer, "state", {}).values()
    held = filled(
        args.device,
        weights=parameters,
        gradients=[p.grad for p in parameters if p.grad is not None],
        optimizer=[v for state in states for v in state.values() if isinstance(v, torch.Tensor)],
    )
    shards = has_shards(model) if manager.identity.world_size > 1 else None
    explain(
        error,
        rank=manager.identity.rank,
        device=args.device,
        place=f"{place} ({held})" if held else place,
        hint=advice(args, is_evaluation=is_evaluation, shards=shards, offloads=manager.config.shard_offload),
    )
