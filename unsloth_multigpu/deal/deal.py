"""Deals the samples of one optimizer step to the ranks, in order or by their lengths, and collates a rank's share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.deal.plan import CostModel, MicroBatches, deal_micro_batches, plan_step, step_time
from unsloth_multigpu.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """One micro-batch of one rank.

    Args:
        positions: Indices of its samples in the step, in the order of one process.
        share: Weight of its mean loss in the loss of the step: 1 for a complete micro-batch of one process, the
            fraction of rows for a part of one, 0 for a filler. Only losses that average over rows need it.
        reference: Index of the micro-batch of one process that it is a part of, if `deal_step` keeps them apart.
        is_filler: This rank has no sample of its own. It computes one with weight 0, to take part in the all-reduce.
        work: Cost of its rows, in tokens; 0 if lengths are unknown.
    """

    positions: tuple[int, ...]
    share: float = 1.0
    reference: int = 0
    is_filler: bool = False
    work: float = 0.0


Plan = list[list[Piece]]


@dataclass(frozen=True)
class Balance:
    """Measured costs of micro-batches and speeds of ranks.

    `max_tokens` limits a micro-batch; None = the most that one can have if ranks get equal numbers of rows.
    """

    cost: CostModel
    speeds: tuple[float, ...]
    max_tokens: int | None = None


def deal_step(
    sizes: Sequence[int], world_size: int, *, regroup: bool, whole: bool = False, in_each: bool = False
) -> Plan:
    """Splits one optimizer step into contiguous shares of nearly equal size.

    Args:
        sizes: Rows of each micro-batch of this step in one process.
        regroup: The loss is a sum divided by the number of tokens of the step, so rows may be regrouped, at most
            `max(sizes)` together. If False, each micro-batch is averaged by itself: no piece mixes rows of two
            micro-batches, and none is split if their number is a multiple of `world_size`.
        whole: Never split a micro-batch.
        in_each: Give every rank an equal part of each micro-batch. If the size of one is no multiple of `world_size`,
            no micro-batch of the step is split.

    Returns:
        `plan[rank]` = its micro-batches, at least one. Every position of the step occurs once, apart from fillers.
    """
    if in_each and not any(size % world_size for size in sizes):
        owners = [i * world_size // size for size in sizes for i in range(size)]
        equal = [[p for p, owner in enumerate(owners) if owner == rank] for rank in range(world_size)]
        return [_pieces_within(share, sizes) for share in equal]
    whole = whole or in_each
    if whole or (not regroup and len(sizes) % world_size == 0):
        cuts = [sum(sizes[: r * len(sizes) // world_size]) for r in range(world_size + 1)]
    else:
        cuts = [r * sum(sizes) // world_size for r in range(world_size + 1)]
    shares = [range(cuts[r], cuts[r + 1]) for r in range(world_size)]
    if regroup and not whole:
        plan = [_even_pieces(share, max(sizes, default=1)) for share in shares]
    else:
        plan = [_pieces_within(share, sizes) for share in shares]
    # Some models cannot compute a single row, such as those with batch norm.
    filler = _filler(*(range(sizes[0]) if whole else (0,)))
    return [pieces or [filler] for pieces in plan]


def balance_step(
    lengths: Sequence[int], sizes: Sequence[int], balance: Balance, *, regroup: bool, is_lockstep: bool = False
) -> Plan:
    """Splits one optimizer step so that all ranks finish at about the same time, and not later than by `deal_step`.

    Args:
        lengths: Tokens of each sample of the step.
        sizes, regroup: See `deal_step`. Without `regroup`, each micro-batch keeps its number of rows, for losses that
            average over independent rows. A step with unequal `sizes`, or whose number of micro-batches is no multiple
            of the number of ranks, is then dealt in order.
        is_lockstep: Ranks wait for each other in every micro-batch, see `plan.step_time`.
    """
    speeds, cost = balance.speeds, balance.cost
    in_order = deal_step(sizes, len(speeds), regroup=regroup)
    if not regroup and (len(set(sizes)) > 1 or len(sizes) % len(speeds)):
        return in_order
    dealt = [[list(p.positions) for p in share if not p.is_filler] for share in in_order]
    to_plan_with = cost.to_plan_with()
    if regroup:
        planned = plan_step(lengths, speeds, to_plan_with, balance.max_tokens or _reach(dealt, lengths, cost))
    else:
        planned = deal_micro_batches(lengths, sizes[0], speeds, to_plan_with)
    before, after = (
        step_time(plan, lengths, speeds, to_plan_with, is_lockstep=is_lockstep) for plan in (dealt, planned)
    )
    # A limit set by the user holds even if it makes the step slower.
    if after >= before and balance.max_tokens is None:
        planned = dealt
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    return [
        [Piece(tuple(rows), work=cost.work([lengths[i] for i in rows])) for rows in share] or [_filler(shortest)]
        for share in planned
    ]


def _reach(dealt: Sequence[MicroBatches], lengths: Sequence[int], cost: CostModel) -> int:
    """Returns the tokens of the largest possible micro-batch: the most rows, each as long as the longest sample."""
    parts = [part for share in dealt for part in share]
    if not cost.is_padded:
        return max(cost.tokens([lengths[i] for i in part]) for part in parts)
    return max(map(len, parts)) * cost.padded(max(lengths))


def in_lockstep(plan: Sequence[Sequence[Piece]], *, whole: bool) -> Plan:
    """Gives all ranks the same number of micro-batches by adding fillers, and sorts them by cost; see `deal_step`.

    Sharded ranks gather weights in every layer of every micro-batch, so unequal numbers of micro-batches would hang.
    Expensive micro-batches come last, at the same time on all ranks. The last one, which reduces gradients, is then no
    filler if the rank has a sample.
    """
    most = max(map(len, plan))
    pieces = [piece for share in plan for piece in share]
    smallest = min(pieces, key=lambda p: (p.work / len(p.positions), len(p.positions), p.positions))
    positions = min(pieces, key=lambda p: len(p.positions)).positions if whole else smallest.positions[-1:]
    filler = _filler(*positions)
    return [[filler] * (most - len(share)) + sorted(share, key=lambda p: (p.work, not p.is_filler)) for share in plan]


def _filler(*positions: int) -> Piece:
    return Piece(positions, share=0.0, is_filler=True)


def check_enough_samples(num_samples: int, world_size: int, num_sharing: int = 1) -> None:
    """Raises ConfigError if a full step has fewer samples than `world_size`. `num_sharing` ranks count as one."""
    if num_samples < world_size:
        raise ConfigError(
            f"An optimizer step of {num_samples} sample(s) cannot be shared by {world_size * num_sharing} ranks.",
            hint=f"Set num_gpus={num_samples * num_sharing} (of all nodes together), or raise "
            f"per_device_train_batch_size or gradient_accumulation_steps to {world_size} samples or "
            "more, or use global_batch='scale'.",
            most_ranks=num_samples * num_sharing,
        )


def equation(sizes: Sequence[int], plan: Plan) -> str:
    """Describes a step: "16 = 2 ranks x 4 samples x 2 accumulation", or "10 = 3 + 3 + 4 samples on 3 ranks"."""
    world_size = len(plan)
    if world_size == 1 and len(set(sizes)) == 1:
        return f"{sum(sizes)} = {sizes[0]} samples x {len(sizes)} accumulation"
    pieces = [0 if p.is_filler else len(p.positions) for share in plan for p in share]
    if len(set(pieces)) == 1 and len({len(share) for share in plan}) == 1:
        return f"{sum(sizes)} = {world_size} ranks x {pieces[0]} samples x {len(plan[0])} accumulation"
    rows = " + ".join(str(sum(len(p.positions) for p in share if not p.is_filler)) for share in plan)
    return f"{sum(sizes)} = {rows} samples on {world_size} rank{'s' if world_size > 1 else ''}"


def _even_pieces(share: range, max_rows: int) -> list[Piece]:
    num_pieces = -(-len(share) // max_rows)
    cuts = [share.start + i * len(share) // num_pieces for i in range(num_pieces + 1)] if num_pieces else []
    return [Piece(tuple(range(a, b))) for a, b in pairwise(cuts)]


def _pieces_within(share: Sequence[int], sizes: Sequence[int]) -> list[Piece]:
    reference_of = [reference for reference, size in enumerate(sizes) for _ in range(size)]
    parts = [(reference, tuple(rows)) for reference, rows in groupby(share, key=reference_of.__getitem__)]
    return [Piece(rows, len(rows) / sizes[reference], reference) for reference, rows in parts]


Rows = list[Any]
Collate = Callable[[Rows], Any]
# Makes a plan. It can be pickled, so that a worker of a loader can call it.
MakePlan = Callable[[], Plan]


@dataclass(frozen=True)
class StepShape:
    """How the samples of a step are dealt; `regroup`, `whole` and `in_each` as in `deal_step`.

    Args:
        num_accumulated: Micro-batches of a step in one process.
        seed: Seed of random numbers that are equal on all ranks: those of a stream, which each rank reads completely.
        rank_seed: Seed for the rows that this rank reads and collates.
        is_lockstep: Ranks synchronize in every micro-batch, so all have the same number.
        num_sharing: Ranks that share each sample. They count as one rank here.
    """

    rank: int
    world_size: int
    num_accumulated: int
    regroup: bool
    seed: int = 0
    rank_seed: int = 0
    whole: bool = False
    in_each: bool = False
    is_lockstep: bool = False
    num_sharing: int = 1

    def in_order(self, sizes: Sequence[int]) -> Plan:
        """Returns the plan of a step whose samples are dealt in order."""
        return deal_step(sizes, self.world_size, regroup=self.regroup, whole=self.whole, in_each=self.in_each)

    def pieces(self, sizes: Sequence[int], make: MakePlan | None = None) -> list[Piece]:
        """Returns this rank's pieces of a step, from a plan or in order."""
        plan = self.in_order(sizes) if make is None else make()
        if self.is_lockstep:
            plan = in_lockstep(plan, whole=self.whole or self.in_each)
        return plan[self.rank]


@dataclass(eq=False)
class MicroBatch:
    """Collated inputs of a forward and backward pass, with their piece of the plan.

    Attributes:
        share: See `Piece`. If the loss is a mean over something other than rows, the fraction of that.
        factor: The loss is multiplied by it.
        is_weighted: The factor was applied when the loss was computed, not when its backward pass started.
    """

    inputs: Any
    piece: Piece
    factor: float = 1.0
    is_weighted: bool = False

    def __post_init__(self) -> None:
        self.share = self.piece.share


@dataclass(eq=False)
class Step:
    """This rank's micro-batches of one optimizer step.

    `step[key]` returns all values of an input in one flat tensor, with which the Trainer counts tokens. It is not a
    Mapping, since torch's loader would turn one into a dict.

    Args:
        sizes: Rows of each micro-batch of this step in one process.
        samples: Indices of all rows of the step, or the rows themselves for a stream.
        left_over: Micro-batches from the previous pass of a stream, see `StepStream`. They are computed first and have
            their own divisor.
        num_items: Tokens of a `left_over` over all ranks, if they are counted.
    """

    micro_batches: list[MicroBatch]
    sizes: Sequence[int]
    samples: Sequence[Any] = ()
    left_over: Step | None = None
    num_items: Any = None

    def pin_memory(self) -> Step:
        """Called by torch's loader for page-locked copies."""
        from torch.utils.data._utils.pin_memory import pin_memory

        pinned = copy.copy(self)
        pinned.micro_batches = [MicroBatch(pin_memory(m.inputs), m.piece) for m in self.micro_batches]
        pinned.left_over = None if self.left_over is None else self.left_over.pin_memory()
        return pinned

    def __getitem__(self, key: str) -> torch.Tensor:
        import torch

        values = [m.inputs[key].reshape(-1) for m in self.micro_batches if not m.piece.is_filler]
        if self.left_over is not None:
            values.append(self.left_over[key])
        return torch.cat(values or [torch.empty(0, dtype=torch.int64)])

    def __contains__(self, key: object) -> bool:
        return key in self.micro_batches[0].inputs


def collate_step(pieces: Sequence[Piece], rows: Sequence[Rows], sizes: Sequence[int], collate: Collate) -> Step:
    """Collates this rank's rows of a step; `sizes` are the rows of each micro-batch in one process."""
    micro_batches = [MicroBatch(collate(r), piece) for piece, r in zip(pieces, rows, strict=True)]
    return Step(micro_batches, tuple(sizes))


def without_labels(inputs: Any) -> Any:
    """Returns the micro-batch with all labels ignored, so that its token-normalized loss and gradient are zero."""
    import torch

    if not isinstance(inputs, Mapping):
        return inputs
    labels = {k: v for k in ("labels", "shift_labels") if isinstance(v := inputs.get(k), torch.Tensor)}
    # A copy keeps the class of the batch, which may offer keys as attributes.
    muted = copy.copy(inputs)
    muted.update({k: torch.full_like(v, -100) for k, v in labels.items()})  # type: ignore[attr-defined]
    return muted
