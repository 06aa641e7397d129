"""Plans a step so that every rank finishes at the same time. Pure: lengths in, positions out."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from unsloth_multigpu.deal.cost import CostModel

MicroBatches = list[list[int]]
# Numbers of rows of a micro-batch that are tried: four for each doubling, two for larger ones.
_SIZES = sorted({round(2 ** (k / 4)) for k in (*range(12), *range(12, 80, 2))})
# Limits for the size of a group, as parts of a rank's load, if whole groups are dealt. For many samples one is enough.
_GROUP_PARTS = (1.0, 0.5, 0.25)
_MANY_SAMPLES = 256


def plan_step(lengths: Sequence[int], speeds: Sequence[float], cost: CostModel, max_tokens: int) -> list[MicroBatches]:
    """Splits one optimizer step's samples so that every rank finishes at the same time.

    Samples go to ranks longest first, each to the rank that would finish it first: with equal ranks, and counting rows
    alone, the slowest stays within 4/3 of the optimum (Graham 1969, "Bounds on Multiprocessing Timing Anomalies"). Each
    rank's samples, sorted, are then cut into micro-batches by dynamic programming. Other plans cut first and deal the
    pieces; the fastest one is returned.

    Args:
        lengths: Tokens of each sample without padding; position = index in the step.
        speeds: Relative speed of each rank.
        max_tokens: Upper limit of the tokens of one micro-batch, padding included. A longer sample is alone.

    Returns:
        `plan[rank][micro_batch]` = indices into `lengths`, the costliest micro-batch of a rank last, since its backward
        pass hides the exchange of gradients best. Every index occurs once. A rank is empty where samples are too few.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    work = [cost.row_work(length) for length in lengths]
    cutter = _Cutter(lengths, cost, max_tokens)
    plans = [[cutter.cut(rows, math.inf) for rows in _dealt(order, work, speeds, fills=True)]]
    load = sum(work) / sum(speeds) * min(speeds)
    for part in _GROUP_PARTS if len(lengths) <= _MANY_SAMPLES else _GROUP_PARTS[-1:]:
        groups = cutter.cut(order, part * load)
        if len(groups) >= len(speeds):
            dealt = _deal_groups(groups, lengths, speeds, cost)
            # A rank without a sample would have to compute a filler.
            plans.extend([dealt] if all(dealt) else [])
    fastest = min(plans, key=lambda plan: slowest_time(plan, lengths, speeds, cost))
    return [sorted(share, key=lambda rows: cost.of([lengths[i] for i in rows])) for share in fastest]


def deal_micro_batches(
    lengths: Sequence[int], num_rows: int, speeds: Sequence[float], cost: CostModel
) -> list[MicroBatches]:
    """Deals micro-batches of `num_rows` samples of similar length, for losses that are means over these samples.

    The number of samples is a multiple of `num_rows`. Returns a plan as `plan_step` does.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups = [order[begin : begin + num_rows] for begin in range(0, len(order), num_rows)]
    return _deal_groups(groups, lengths, speeds, cost)


def slowest_time(
    plan: Sequence[MicroBatches], lengths: Sequence[int], speeds: Sequence[float], cost: CostModel
) -> float:
    """Returns the time of the slowest rank, in tokens."""
    return max(sum(share) / speed for share, speed in zip(_costs(plan, lengths, cost), speeds, strict=True))


def lockstep_time(
    plan: Sequence[MicroBatches], lengths: Sequence[int], speeds: Sequence[float], cost: CostModel
) -> float:
    """Returns the time of a step, in tokens, if ranks wait for each other in every micro-batch, as sharded ranks do.

    This is `sum_k max_r cost(r, k)` instead of `max_r sum_k cost(r, k)`. The costliest micro-batches of all ranks are
    computed at the same time. A rank with fewer micro-batches computes fillers.
    """
    filler = cost.of([min(lengths)])
    shares = [sorted(share, reverse=True) for share in _costs(plan, lengths, cost)]
    most = max(map(len, shares))
    rounds = zip(*(share + [filler] * (most - len(share)) for share in shares), strict=True)
    return float(sum(max(c / speed for c, speed in zip(costs, speeds, strict=True)) for costs in rounds))


def _costs(plan: Sequence[MicroBatches], lengths: Sequence[int], cost: CostModel) -> list[list[float]]:
    return [[cost.of([lengths[i] for i in rows]) for rows in share] for share in plan]


class _Cutter:
    """Cuts sorted samples into micro-batches with the lowest total cost, by dynamic programming."""

    def __init__(self, lengths: Sequence[int], cost: CostModel, max_tokens: int) -> None:
        self._cost = cost
        self._max_tokens = max_tokens
        self._padded = [cost.padded(length) for length in lengths]
        self._work = [cost.row_work(length) for length in lengths]

    def cut(self, rows: Sequence[int], max_work: float) -> MicroBatches:
        """Returns the cheapest cut of `rows`, which are sorted, the longest first.

        `max_work` limits micro-batches of several rows.
        """
        count = len(rows)
        # For the rows from each index on: the lowest cost, and the number of rows of the first micro-batch.
        best, size_of = [0.0] * (count + 1), [0] * count
        overhead, floor, is_padded = self._cost.overhead_tokens, self._cost.floor_tokens, self._cost.is_padded
        alone = [self._work[i] for i in rows]
        padded = [self._padded[i] for i in rows]
        work_before, tokens_before = [0.0, *accumulate(alone)], [0, *accumulate(padded)]
        all_work, worth = work_before[count], overhead + floor
        for start in range(count - 1, -1, -1):
            row_work = alone[start]
            if is_padded:
                most = min(self._max_tokens // max(1, padded[start]), max_work // max(1.0, row_work))
            else:
                most = bisect_right(tokens_before, tokens_before[start] + self._max_tokens) - 1 - start
                most = min(most, bisect_right(work_before, work_before[start] + max_work) - 1 - start)
            most = max(1, min(int(most), count - start))
            # Only some sizes are tried: of those that cost no more than the floor the largest, and always the maximum.
            last = bisect_left(_SIZES, most)
            first = max(0, bisect_right(_SIZES, floor / row_work) - 1) if is_padded and row_work > 0 else 0
            least = math.inf
            for size in (*_SIZES[min(first, last) : last], most):
                end = start + size
                if is_padded:
                    work = size * row_work
                    # The other rows cost at least their work without padding, and larger sizes have more padding.
                    if work + all_work - work_before[end] >= least:
                        break
                    # Padding the shorter half costs more than one more micro-batch. Larger sizes have more padding.
                    middle = start + size // 2
                    if size > 1 and (end - middle) * (row_work - alone[middle]) > worth:
                        break
                else:
                    work = work_before[end] - work_before[start]
                value = (work if work > floor else floor) + best[end]
                if value < least:
                    least, size_of[start] = value, size
            best[start] = least + overhead
        pieces, start = [], 0
        while start < count:
            pieces.append(list(rows[start : start + size_of[start]]))
            start += size_of[start]
        return pieces[::-1]  # The shortest rows first, because they are rarely the costliest.


def _deal_groups(
    groups: MicroBatches, lengths: Sequence[int], speeds: Sequence[float], cost: CostModel
) -> list[MicroBatches]:
    costs = [cost.of([lengths[i] for i in group]) for group in groups]
    order = sorted(range(len(groups)), key=lambda g: (-costs[g], g))
    return [[groups[g] for g in share] for share in _dealt(order, costs, speeds)]


def _dealt(
    order: Sequence[int], work: Sequence[float], speeds: Sequence[float], *, fills: bool = False
) -> MicroBatches:
    """Gives each item, in order, to the rank that would finish it first; `fills`: every rank gets one if possible."""
    shares: MicroBatches = [[] for _ in speeds]
    loads = [0.0] * len(speeds)
    for num_left, i in zip(range(len(order), 0, -1), order, strict=True):
        empty = [rank for rank, share in enumerate(shares) if not share] if fills and num_left <= len(speeds) else []
        if empty and num_left <= len(empty):
            rank = max(empty, key=lambda r: speeds[r])
        else:
            rank = min(range(len(loads)), key=lambda r: (loads[r] + work[i]) / speeds[r])
        loads[rank] += work[i]
        shares[rank].append(i)
    return shares
