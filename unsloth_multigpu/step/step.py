"""One optimizer step of one rank: how it is dealt, and its collated micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unsloth_multigpu.step.ahead import Ahead
from unsloth_multigpu.step.deal import Piece, deal_step, with_groups
from unsloth_multigpu.step.lockstep import in_lockstep

Rows = list[Any]
Collate = Callable[[Rows], Any]
Plan = list[list[Piece]]


class StepPlanner(Protocol):
    """Plans steps of which it knows the samples by their lengths.

    Attributes:
        num_steps: How many steps were computed so far.
    """

    @property
    def num_steps(self) -> int: ...

    def plan(self, samples: Sequence[int], sizes: Sequence[int], step_index: int) -> Callable[[], Plan] | None:
        """What makes the plan of step `step_index`; None where it is to be dealt in order.

        Called at the same place of the training on all ranks. What it returns reads nothing that changes, so that it
        may be called at any time, in any thread.
        """


@dataclass(frozen=True)
class StepShape:
    """How the samples of a step are dealt.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        num_accumulated: Micro-batches of one step of the one-process run.
        regroup: See `deal_step`.
        whole: See `deal_step`.
        is_lockstep: Ranks meet in every micro-batch, of which all have the same number.
        planner: Plans steps whose samples have known lengths.
        seed: Where random numbers begin that all ranks draw alike: those of a stream, which each reads whole.
        rank_seed: The same of what this rank looks up and collates for itself.
    """

    rank: int
    world_size: int
    num_accumulated: int
    regroup: bool
    planner: StepPlanner
    seed: int = 0
    rank_seed: int = 0
    whole: bool = False
    is_lockstep: bool = False

    def in_order(self, sizes: Sequence[int]) -> list[Piece]:
        """This rank's pieces of a step that is dealt in order."""
        return self._mine(deal_step(sizes, self.world_size, regroup=self.regroup, whole=self.whole), sizes)

    def pieces(self, sizes: Sequence[int], samples: Sequence[int], step_index: int) -> Ahead[list[Piece]]:
        """This rank's pieces of step `step_index`; `samples` are its indices in a data set with random access."""
        make = self.planner.plan(samples, sizes, step_index)
        return Ahead(lambda: self.in_order(sizes) if make is None else self._mine(make(), sizes))

    def _mine(self, plan: Sequence[Sequence[Piece]], sizes: Sequence[int]) -> list[Piece]:
        level = in_lockstep(plan, whole=self.whole) if self.is_lockstep else plan
        return with_groups(level, sizes)[self.rank]


class MicroBatch:
    """Collated inputs of one forward-backward pass with the piece of the plan that they are."""

    def __init__(self, inputs: Any, piece: Piece) -> None:
        self.inputs = inputs
        self.piece = piece
        self.share = piece.share
        # Labels, rows or weights that its mean loss is taken over, where parts of a micro-batch are weighed by them.
        self.weight = 0.0
        # True where the whole of which it is a part has none of these, so that one process has no mean of it.
        self.is_unweighted = False

    def pin_memory(self) -> MicroBatch:
        """Called by torch's loader for page-locked copies."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return MicroBatch(pin_memory(self.inputs), self.piece)


class Step:
    """This rank's micro-batches of one optimizer step.

    Indexed by a key it gives all its values in one flat tensor: the Trainer counts tokens that way. It is not a
    Mapping, since torch's loader would turn one into a dict.

    Attributes:
        left_over: Of the pass of a stream before, see `StepStream`: computed first, and divided by itself.
        left_over_items: Its tokens over all ranks, where they are counted.
        following: The plan of the next step, where it is made in this process.
        sizes: Rows of each micro-batch that the one-process run would do in this step.
        samples: What all rows of the step are looked up by: indices, or the rows themselves of a stream.
    """

    def __init__(
        self,
        micro_batches: list[MicroBatch],
        num_references: int,
        following: Ahead[list[Piece]] | None = None,
        sizes: Sequence[int] = (),
        samples: Sequence[Any] = (),
    ) -> None:
        self.micro_batches = micro_batches
        self.num_references = num_references
        self.sizes = tuple(sizes)
        self.samples = samples
        self.left_over: Step | None = None
        self.left_over_items: Any = None
        self.following = following

    def plan_following(self) -> None:
        """Begins to plan the next step. For the moment when all of this one is launched, and the host waits for it."""
        if self.following is not None:
            self.following.start()

    def pin_memory(self) -> Step:
        """Called by torch's loader for page-locked copies."""
        micro_batches = [m.pin_memory() for m in self.micro_batches]
        pinned = Step(micro_batches, self.num_references, self.following, self.sizes, self.samples)
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


def collate_step(
    pieces: Sequence[Piece], rows: Sequence[Rows], num_references: int, collate: Collate, regroup: bool
) -> Step:
    micro_batches = [MicroBatch(collate(r), piece) for piece, r in zip(pieces, rows, strict=True)]
    for micro_batch in micro_batches:
        # A mean over no labels is not a number; there the filler's share of zero is enough.
        if micro_batch.piece.is_filler and regroup:
            micro_batch.inputs = without_labels(micro_batch.inputs)
    return Step(micro_batches, num_references)


def without_labels(inputs: Any) -> Any:
    """The same micro-batch, of which no token counts: its token-normalised loss and gradient are zero."""
    if not isinstance(inputs, Mapping):
        return inputs
    labels = {k: v for k in ("labels", "shift_labels") if isinstance(v := inputs.get(k), torch.Tensor)}
    # In a copy of the batch, whose class may give keys as attributes.
    muted = copy.copy(inputs)
    muted.update({k: torch.full_like(v, -100) for k, v in labels.items()})  # type: ignore[attr-defined]
    return muted
