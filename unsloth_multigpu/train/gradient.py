"""A gradient that is not finite: what a rank can say about it, and how many such steps may be left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from unsloth_multigpu.errors import NonFiniteGradientError
from unsloth_multigpu.group.shards import is_sharded, norm_of_parts, part_of
from unsloth_multigpu.words import listed

# A run that leaves out more steps than this is no longer training.
MAX_SKIPPED_IN_A_ROW = 10
_MAX_NAMED = 3


class SkippedSteps:
    """Counts the steps that were left out."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_in_a_row = 0

    def skip(self, fact: str) -> str:
        """Counts one more step, of which `fact` tells, and returns what to warn of.

        Raises:
            NonFiniteGradientError: `MAX_SKIPPED_IN_A_ROW` were left out in a row before it.
        """
        if self.num_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise NonFiniteGradientError(
                f"{fact}. The {MAX_SKIPPED_IN_A_ROW} steps before it were left out as well.",
                hint="Lower the learning rate, or resume from an earlier checkpoint: the weights give no finite loss.",
            )
        self.num_steps += 1
        self.num_in_a_row += 1
        return f"{fact}: left out on all ranks ({self.num_steps} so far)"


def total_norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
    """Norm of all gradients together, on their device. Collective where they are sharded."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(map(is_sharded, gradients)):
        return norm_of_parts(gradients, norm_type)
    return nn.utils.get_total_norm([_values(gradient) for gradient in gradients], norm_type)


def not_finite_losses(losses: Sequence[torch.Tensor]) -> list[tuple[int, str]]:
    """Micro-batch and value, "nan" or "inf", of each loss of a step that is not finite."""
    values = [float(loss) for loss in losses]
    return [(i, str(value)) for i, value in enumerate(values) if not math.isfinite(value)]


def not_finite_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient, or this rank's part of it, holds a value that is not finite."""
    named = [(name, part_of(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
    return [name for name, gradient in named if not _values(gradient).isfinite().all()]


def describe(
    step: int, norm: float, losses: Mapping[int, Sequence[tuple[int, str]]], parameters: Sequence[str] = ()
) -> str:
    """One line on a step.

    Args:
        step: Counted from 1.
        norm: Of the gradient; not finite.
        losses: Rank -> what `not_finite_losses` found there. Only ranks that were asked.
        parameters: What `not_finite_parameters` found; read where no loss says more.
    """
    found = [
        f"loss of rank {rank}, micro-batch {micro_batch}, was {value}"
        for rank, its in losses.items()
        for micro_batch, value in its
    ]
    if found:
        return f"step {step}: gradient norm is {norm}; {listed(found, _MAX_NAMED, '; ')}"
    whose = "all losses were finite" if len(losses) > 1 else f"the losses of rank {next(iter(losses))} were finite"
    if parameters:
        whose += f", not so the gradient of {listed(parameters, _MAX_NAMED)}"
    return f"step {step}: gradient norm is {norm}; {whose}"


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
