"""Deals the samples of one optimizer step to the ranks, in order or by their lengths. Pure: positions in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from unsloth_multigpu.deal.cost import CostModel
from unsloth_multigpu.deal.plan import MicroBatches, deal_micro_batches, lockstep_time, plan_step, slowest_time
from unsloth_multigpu.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """One micro-batch of one rank.

    Args:
        positions: Indices of its samples in the step, in the order of one process.
        share: Weight of its mean loss in the loss of the step: 1 for a complete micro-batch of one process, the
            fraction of rows for a part of one, 0 for a filler. Only losses that average over rows need it.
        reference: Index of the micro-batch of one process that it is a part of, if `deal_step` keeps them apart.
        is_filler: This rank has no sample of its own. It computes one with weight 0, to take part in the all-reduce.
        is_muted: A filler whose labels are left out. For a mean over labels, which would be NaN, weight 0 is enough.
        work: Cost of its rows, in tokens; 0 if lengths are unknown.
    """

    positions: tuple[int, ...]
    share: float = 1.0
    reference: int = 0
    is_filler: bool = False
    is_muted: bool = False
    work: float = 0.0


Plan = list[list[Piece]]


@dataclass(frozen=True)
class Balance:
    """Measured costs of micro-batches and speeds of ranks.

    `max_tokens` limits a micro-batch; None = the maximum that shares of equal numbers of rows could have.
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
        world_size: Number of ranks.
        regroup: The loss is a sum divided by the number of tokens of the step, so rows may be regrouped, at most
            `max(sizes)` together. If False, each micro-batch is averaged by itself: no piece mixes rows of two
            micro-batches, and they are not split if their number is a multiple of the ranks.
        whole: Never split a micro-batch.
        in_each: Give every rank an equal part of each micro-batch. If one does not divide by the ranks, none of the
            step is split.

    Returns:
        `plan[rank]` = its micro-batches, at least one. Every position of the step occurs once, apart from fillers.
    """
    num_rows = sum(sizes)
    if in_each and not any(size % world_size for size in sizes):
        return [_equal_parts(sizes, world_size, rank) for rank in range(world_size)]
    whole = whole or in_each
    if whole or (not regroup and len(sizes) % world_size == 0):
        cuts = [sum(sizes[: r * len(sizes) // world_size]) for r in range(world_size + 1)]
    else:
        cuts = [r * num_rows // world_size for r in range(world_size + 1)]
    shares = [range(cuts[r], cuts[r + 1]) for r in range(world_size)]
    if regroup and not whole:
        plan = [_even_pieces(share, max(sizes, default=1)) for share in shares]
    else:
        plan = [_pieces_within(share, sizes) for share in shares]
    # Some models cannot compute a single row, such as those with batch norm.
    filler = _filler(*(range(sizes[0]) if whole else (0,)), is_muted=regroup)
    return [pieces or [filler] for pieces in plan]


def balance_step(
    lengths: Sequence[int], sizes: Sequence[int], balance: Balance, *, regroup: bool, is_lockstep: bool = False
) -> Plan:
    """Splits one optimizer step so that all ranks finish at the same time, and no later than with `deal_step`.

    Args:
        lengths: Tokens of each sample of the step.
        sizes: Rows of each micro-batch of this step in one process.
        regroup: See `deal_step`. If False, each micro-batch keeps its number of rows, for losses that average over
            independent rows. A step with unequal `sizes`, or whose number of micro-batches is no multiple of the
            ranks, is then dealt in order.
        is_lockstep: Ranks wait for each other in every micro-batch, see `plan.lockstep_time`.

    Returns:
        `plan[rank]` = its micro-batches, as from `deal_step`.
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
    time_of = lockstep_time if is_lockstep else slowest_time
    before, after = (time_of(plan, lengths, speeds, to_plan_with) for plan in (dealt, planned))
    # A limit set by the user holds even if it makes the step slower.
    if after >= before and balance.max_tokens is None:
        planned = dealt
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    return [
        [Piece(tuple(rows), work=cost.work([lengths[i] for i in rows])) for rows in share]
        or [_filler(shortest, is_muted=regroup)]
        for share in planned
    ]


def _reach(dealt: Sequence[MicroBatches], lengths: Sequence[int], cost: CostModel) -> int:
    """Returns the tokens of the largest possible micro-batch: the most rows, each as long as the longest sample."""
    parts = [part for share in dealt for part in share]
    if not cost.is_padded:
        return max(cost.tokens([lengths[i] for i in part]) for part in parts)
    return max(map(len, parts)) * cost.padded(max(lengths))


def in_lockstep(plan: Sequence[Sequence[Piece]], *, regroup: bool, whole: bool) -> Plan:
    """Gives all ranks the same number of micro-batches by adding fillers, and sorts them by cost; see `deal_step`.

    Sharded ranks gather weights in every layer of every micro-batch, so unequal numbers of micro-batches would hang.
    Expensive micro-batches come last, at the same time on all ranks. The last one, which reduces gradients, is then no
    filler if the rank has a sample.
    """
    most = max(map(len, plan))
    pieces = [piece for share in plan for piece in share]
    smallest = min(pieces, key=lambda p: (p.work / len(p.positions), len(p.positions), p.positions))
    positions = min(pieces, key=lambda p: len(p.positions)).positions if whole else smallest.positions[-1:]
    filler = _filler(*positions, is_muted=regroup)
    return [
        [*[filler] * (most - len(share)), *sorted(share, key=lambda p: (p.work, p.is_filler is False))]
        for share in plan
    ]


def _filler(*positions: int, is_muted: bool) -> Piece:
    return Piece(positions, share=0.0, is_filler=True, is_muted=is_muted)


def check_divisible(num_samples: int, world_size: int, num_sharing: int = 1) -> None:
    """Raises if a full step has fewer samples than ranks, or than groups of `num_sharing` ranks that share each sample.

    Raises:
        ConfigError: `num_samples < world_size`.
    """
    if num_samples < world_size:
        raise ConfigError(
            f"An optimizer step of {num_samples} sample(s) cannot be shared by {world_size * num_sharing} ranks.",
            hint=f"Set num_gpus={num_samples * num_sharing} (of all nodes together), or raise "
            f"per_device_train_batch_size or gradient_accumulation_steps to {world_size} samples or "
            "more, or use global_batch='scale'.",
            most_ranks=num_samples * num_sharing,
        )


def equation(
    sizes: Sequence[int], world_size: int, *, regroup: bool, whole: bool = False, in_each: bool = False
) -> str:
    """Describes the step: "16 = 2 ranks x 4 samples x 2 accumulation", or "10 = 3 + 3 + 4 samples on 3 ranks"."""
    if world_size == 1 and len(set(sizes)) == 1:
        return f"{sum(sizes)} = {sizes[0]} samples x {len(sizes)} accumulation"
    plan = deal_step(sizes, world_size, regroup=regroup, whole=whole, in_each=in_each)
    pieces = [0 if p.is_filler else len(p.positions) for share in plan for p in share]
    if len(set(pieces)) == 1 and len({len(share) for share in plan}) == 1:
        return f"{sum(sizes)} = {world_size} ranks x {pieces[0]} samples x {len(plan[0])} accumulation"
    rows = " + ".join(str(sum(len(p.positions) for p in share if not p.is_filler)) for share in plan)
    return f"{sum(sizes)} = {rows} samples on {world_size} rank{'s' if world_size > 1 else ''}"


def _even_pieces(share: range, max_rows: int) -> list[Piece]:
    num_pieces = -(-len(share) // max_rows)
    cuts = [share.start + i * len(share) // num_pieces for i in range(num_pieces + 1)] if num_pieces else []
    return [Piece(tuple(range(a, b))) for a, b in pairwise(cuts)]


def _equal_parts(sizes: Sequence[int], world_size: int, rank: int) -> list[Piece]:
    parts = []
    for reference, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        begin, rows = end - size + rank * size // world_size, size // world_size
        parts.append(Piece(tuple(range(begin, begin + rows)), 1 / world_size, reference))
    return parts


def _pieces_within(share: range, sizes: Sequence[int]) -> list[Piece]:
    pieces = []
    for reference, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        rows = range(max(share.start, end - size), min(share.stop, end))
        if rows:
            pieces.append(Piece(tuple(rows), len(rows) / size, reference))
    return pieces
