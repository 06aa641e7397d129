"""Deals the samples of one optimizer step to the ranks, in order or by their lengths. Pure: positions in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.plan import MicroBatches, deal_micro_batches, lockstep_time, plan_step, slowest_time


@dataclass(frozen=True)
class Piece:
    """One micro-batch of one rank.

    Args:
        positions: Places of its samples in the step, in the order of the one-process run.
        share: What its mean loss counts in the step's loss: 1 for a whole micro-batch of the one-process run,
            the part of the rows for a part of one, 0 for a filler. Only losses that average over rows need it.
        reference: Which micro-batch of the one-process run it is a part of, where `deal_step` keeps them apart.
        is_filler: True where a rank has no sample of its own and computes one without effect, so that it still
            takes part in the gradient exchange.
        is_muted: A filler whose labels are left out. A mean over no labels is not a number; there the filler's share
            of zero is enough.
        work: What its rows cost, in tokens; 0 where lengths are not known.
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
    """What is known of the time that micro-batches take.

    Args:
        cost: Of a micro-batch.
        speeds: Relative speed of each rank.
        max_tokens: Most tokens of a micro-batch; None = what shares of equal numbers of rows could reach.
    """

    cost: CostModel
    speeds: tuple[float, ...]
    max_tokens: int | None = None


def deal_step(
    sizes: Sequence[int], world_size: int, *, regroup: bool, whole: bool = False, in_each: bool = False
) -> Plan:
    """Splits one optimizer step into contiguous shares, as even as whole samples, or micro-batches, allow.

    Args:
        sizes: Rows of each micro-batch that the one-process run would do in this step.
        world_size: Number of ranks.
        regroup: True where the loss is a sum divided by the step's token count: then rows may be regrouped, up to
            the largest of `sizes` together. False where each micro-batch is averaged by itself: then no piece mixes
            rows of two of them, and they stay whole if their number divides evenly.
        whole: True where a micro-batch must never be cut, whatever their number: the loss is known for whole ones only.
        in_each: True where all ranks have an equal part of each micro-batch; where one does not divide by the ranks,
            all of the step stay whole.

    Returns:
        `plan[rank]` = its micro-batches, at least one. Every position of the step occurs once outside of fillers.
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
    # Some models cannot compute a part, such as one row of a batch norm.
    filler = _filler(*(range(sizes[0]) if whole else (0,)), is_muted=regroup)
    return [pieces or [filler] for pieces in plan]


def balance_step(
    lengths: Sequence[int], sizes: Sequence[int], balance: Balance, *, regroup: bool, is_lockstep: bool = False
) -> Plan:
    """Splits one optimizer step so that all ranks finish at the same time, and no later than with `deal_step`.

    Args:
        lengths: Tokens of each sample of the step.
        sizes: Rows of each micro-batch that the one-process run would do in this step.
        balance: What micro-batches cost, and how fast the ranks are.
        regroup: See `deal_step`. False keeps the number of rows of each micro-batch, for losses that are means over
            independent rows. A step whose micro-batches have unequal `sizes`, or do not divide by the ranks, is then
            dealt in order.
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
    # A limit that was asked for holds even where it makes the step slower.
    if after >= before and balance.max_tokens is None:
        planned = dealt
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    return [
        [Piece(tuple(rows), work=cost.work([lengths[i] for i in rows])) for rows in share]
        or [_filler(shortest, is_muted=regroup)]
        for share in planned
    ]


def _reach(dealt: Sequence[MicroBatches], lengths: Sequence[int], cost: CostModel) -> int:
    """Most tokens that a micro-batch could have held: as many rows as one has, each as long as the longest."""
    parts = [part for share in dealt for part in share]
    if not cost.is_padded:
        return max(cost.tokens([lengths[i] for i in part]) for part in parts)
    return max(map(len, parts)) * cost.padded(max(lengths))


def in_lockstep(plan: Sequence[Sequence[Piece]], *, regroup: bool, whole: bool) -> Plan:
    """Gives all ranks the same number of micro-batches, by fillers, and computes the costliest of all ranks together.

    Ranks that hold shards of the weights exchange them in every layer of every micro-batch: with unequal numbers of
    micro-batches they would hang. The costliest are last: gradients are reduced in a rank's last micro-batch, which is
    then never a filler where it has a sample.

    Args:
        plan: `plan[rank]` = its micro-batches.
        regroup: See `deal_step`.
        whole: See `deal_step`.
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
    """Raises where a full step has fewer samples than there are ranks.

    Args:
        num_samples: Of a step.
        world_size: Number of ranks, or of groups of ranks that share each sample.
        num_sharing: Ranks of such a group.

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
    """The step in words: "16 = 2 ranks x 4 samples x 2 accumulation", or "10 = 3 + 3 + 4 samples on 3 ranks"."""
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
