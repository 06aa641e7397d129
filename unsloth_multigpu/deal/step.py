"""One optimizer step of a rank: how it is dealt, and its collated micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_multigpu.deal.deal import Piece, Plan, deal_step, in_lockstep

Rows = list[Any]
Collate = Callable[[Rows], Any]
# Makes a plan. It can be pickled, so that a worker of a loader can call it.
MakePlan = Callable[[], Plan]


@dataclass(frozen=True)
class StepShape:
    """How the samples of a step are dealt; `regroup`, `whole` and `in_each` as in `deal_step`.

    Args:
        num_accumulated: Micro-batches of a step in one process.
        planner: Called with the samples of a step and the rows of its micro-batches in one process, at the same point
            of the training on all ranks. If it is None, or returns None, samples are dealt in order.
        seed: Seed of random numbers that are equal on all ranks: those of a stream, which each rank reads completely.
        rank_seed: Seed for the rows that this rank reads and collates.
        is_lockstep: Ranks synchronize in every micro-batch, so all have the same number.
        num_sharing: Ranks that share each sample. They count as one rank here.
    """

    rank: int
    world_size: int
    num_accumulated: int
    regroup: bool
    planner: Callable[[Sequence[int], Sequence[int]], MakePlan | None] | None = None
    seed: int = 0
    rank_seed: int = 0
    whole: bool = False
    in_each: bool = False
    is_lockstep: bool = False
    num_sharing: int = 1

    def pieces(self, sizes: Sequence[int], make: MakePlan | None = None) -> list[Piece]:
        """Returns this rank's pieces of a step, from a plan or in order."""
        how = {"regroup": self.regroup, "whole": self.whole, "in_each": self.in_each}
        plan = deal_step(sizes, self.world_size, **how) if make is None else make()
        keeps_whole = self.whole or self.in_each
        return (in_lockstep(plan, regroup=self.regroup, whole=keeps_whole) if self.is_lockstep else plan)[self.rank]


class MicroBatch:
    """Collated inputs of a forward and backward pass, with their piece of the plan.

    Attributes:
        share: See `Piece`; for means that are not over rows, the corresponding weight.
        factor: Factor of the loss.
        is_weighed: The factor was applied when the loss was computed, not when its backward pass started.
    """

    def __init__(self, inputs: Any, piece: Piece) -> None:
        self.inputs = inputs
        self.piece = piece
        self.share = piece.share
        self.factor = 1.0
        self.is_weighed = False

    def pin_memory(self) -> MicroBatch:
        """Called by torch's loader for page-locked copies."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return MicroBatch(pin_memory(self.inputs), self.piece)


class Step:
    """This rank's micro-batches of one optimizer step.

    `step[key]` returns all values of an input in one flat tensor, with which the Trainer counts tokens. It is not a
    Mapping, since torch's loader would turn one into a dict.

    Attributes:
        num_references: Micro-batches of this step in one process.
        sizes: Rows of each of them.
        samples: Indices of all rows of the step, or the rows themselves for a stream.
        left_over: Micro-batches from the previous pass of a stream, see `StepStream`. They are computed first and have
            their own divisor.
        left_over_items: Tokens of `left_over` over all ranks, if they are counted.
    """

    def __init__(self, micro_batches: list[MicroBatch], num_references: int, sizes: Sequence[int] = ()) -> None:
        self.micro_batches = micro_batches
        self.num_references = num_references
        self.sizes = tuple(sizes)
        self.samples: Sequence[Any] = ()
        self.left_over: Step | None = None
        self.left_over_items: Any = None

    def pin_memory(self) -> Step:
        """Called by torch's loader for page-locked copies."""
        pinned = copy.copy(self)
        pinned.micro_batches = [micro_batch.pin_memory() for micro_batch in self.micro_batches]
        pinned.left_over = None if self.left_over is None else self.left_over.pin_memory()
        return pinned

    def __getitem__(self, key: str) -> torch.Tensor:
        values = [m.inputs[key].reshape(-1) for m in self.micro_batches if not m.piece.is_filler]
        if self.left_over is not None:
            values.append(self.left_over[key])
        return torch.cat(values or [_EMPTY])

    def __contains__(self, key: object) -> bool:
        return key in self.micro_batches[0].inputs


_EMPTY = torch.empty(0, dtype=torch.int64)


def collate_step(pieces: Sequence[Piece], rows: Sequence[Rows], num_references: int, collate: Collate) -> Step:
    micro_batches = [MicroBatch(collate(r), piece) for piece, r in zip(pieces, rows, strict=True)]
    for micro_batch in micro_batches:
        if micro_batch.piece.is_muted:
            micro_batch.inputs = without_labels(micro_batch.inputs)
    return Step(micro_batches, num_references)


def without_labels(inputs: Any) -> Any:
    """Returns the micro-batch with all labels ignored, so that its token-normalized loss and gradient are zero."""
    if not isinstance(inputs, Mapping):
        return inputs
    labels = {k: v for k in ("labels", "shift_labels") if isinstance(v := inputs.get(k), torch.Tensor)}
    # A copy keeps the class of the batch, which may offer keys as attributes.
    muted = copy.copy(inputs)
    muted.update({k: torch.full_like(v, -100) for k, v in labels.items()})  # type: ignore[attr-defined]
    return muted
