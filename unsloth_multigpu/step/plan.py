"""Plans a step so that every rank finishes at the same time. Pure: lengths in, positions out."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from unsloth_multigpu.step.cost import CostModel

MicroBatches = list[list[int]]
# A plan that is so near to equal shares is not worth a search for a better one.
_GOOD_ENOUGH = 1.005
_TRIED_EXCHANGES = 4
# Numbers of rows of a micro-batch that are tried, four for each doubling.
_SIZES = sorted({round(2 ** (k / 4)) for k in (*range(12), *range(12, 80, 2))})
_EXCHANGES_PER_RANK = 4
# Largest part of a rank's load that one group may be, where whole groups are dealt. Of many samples one try is enough.
_GROUP_PARTS = (1.0, 0.5, 0.25)
_MANY_SAMPLES = 256


@dataclass(frozen=True)
class _Problem:
    """One step: the order of its samples, what they cost, and how a rank groups those that it is given.

    Args:
        lengths: Tokens of each sample.
        work: Cost of each sample alone, without the overhead of a micro-batch.
        speeds: Relative speed of each rank.
        group: Makes the micro-batches of a rank from its samples, sorted with the longest first.
        cost: The model.
        may_move: A rank may get more samples, and another fewer; else they can only be exchanged.
    """

    lengths: Sequence[int]
    work: Sequence[float]
    speeds: Sequence[float]
    group: Callable[[int, Sequence[int]], MicroBatches]
    cost: CostModel
    may_move: bool

    def rank_cost(self, micro_batches: MicroBatches) -> float:
        return sum(map(self.part_cost, micro_batches))

    def part_cost(self, part: Sequence[int]) -> float:
        works = [self.work[i] for i in part]
        return self.cost.of_work(len(part) * max(works) if self.cost.is_padded else sum(works))

    def time(self, rank: int, micro_batches: MicroBatches) -> float:
        return self.rank_cost(micro_batches) / self.speeds[rank]

    def slowest(self, plan: Sequence[MicroBatches]) -> float:
        return max(self.time(rank, share) for rank, share in enumerate(plan))


def plan_step(lengths: Sequence[int], speeds: Sequence[float], cost: CostModel, max_tokens: int) -> list[MicroBatches]:
    """Splits one optimizer step's samples so that every rank finishes at the same time.

    Samples go to ranks longest first, each to the rank that would finish it first: with equal ranks, and counting rows
    alone, the slowest stays within 4/3 of the optimum (Graham 1969, "Bounds on Multiprocessing Timing Anomalies"). Each
    rank's samples, sorted, are then cut into micro-batches by dynamic programming. Another plan cuts first and deals
    the pieces; the faster of the two is improved by moving and exchanging single samples between ranks.

    Args:
        lengths: Tokens of each sample without padding; position = index in the step.
        speeds: Relative speed of each rank.
        cost: What a micro-batch costs.
        max_tokens: Upper limit of the tokens of one micro-batch, padding included. A longer sample is alone.

    Returns:
        `plan[rank][micro_batch]` = indices into `lengths`, the costliest micro-batch of a rank last, since its backward
        pass hides the exchange of gradients best. Every index occurs once. A rank is empty where samples are too few.
    """
    order = _longest_first(lengths)
    work = [cost.row_work(length) for length in lengths]
    limit = _Limit(lengths, cost, max_tokens)
    problem = _Problem(lengths, work, speeds, lambda _, rows: limit.cut(rows, math.inf), cost, may_move=True)
    plans = [[problem.group(rank, rows) for rank, rows in enumerate(_deal_rows(order, work, speeds))]]
    load = sum(work) / sum(speeds) * min(speeds)
    for part in _GROUP_PARTS if len(lengths) <= _MANY_SAMPLES else _GROUP_PARTS[-1:]:
        groups = limit.cut(order, part * load)
        if len(groups) >= len(speeds):
            dealt = _deal_groups(groups, problem)
            # A rank without a sample has to compute one all the same.
            plans.extend([dealt] if all(dealt) else [])
    return _improve(min(plans, key=problem.slowest), problem)


def permute_step(
    lengths: Sequence[int], rows: Sequence[Sequence[int]], speeds: Sequence[float], cost: CostModel
) -> list[MicroBatches]:
    """Exchanges samples between micro-batches of given numbers of rows so that all ranks finish at the same time.

    Args:
        lengths: Tokens of each sample.
        rows: Number of rows of each micro-batch of each rank: `rows[rank][micro_batch]`.
        speeds: Relative speed of each rank.
        cost: What a micro-batch costs.

    Returns:
        `plan[rank][micro_batch]` = indices into `lengths`, with the numbers of `rows`, in any order within a rank.
    """
    order = _longest_first(lengths)
    work = [cost.row_work(length) for length in lengths]

    def group(rank: int, mine: Sequence[int]) -> MicroBatches:
        # Few rows to the longest samples: less is padded.
        sizes = sorted(rows[rank])
        ends = list(accumulate(sizes))
        return [list(mine[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    problem = _Problem(lengths, work, speeds, group, cost, may_move=False)
    by_rows = _deal_rows(order, work, speeds, places=[sum(sizes) for sizes in rows])
    slots = sorted((size, rank) for rank, sizes in enumerate(rows) for size in sizes)
    plans = [by_rows, _deal_slots(order, slots, problem)]
    return _improve(min(([group(r, m) for r, m in enumerate(p)] for p in plans), key=problem.slowest), problem)


def slowest_time(
    plan: Sequence[MicroBatches], lengths: Sequence[int], speeds: Sequence[float], cost: CostModel
) -> float:
    """Time of the slowest rank, in tokens."""
    times = (
        sum(cost.of([lengths[i] for i in part]) for part in share) / s for share, s in zip(plan, speeds, strict=True)
    )
    return max(times)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


class _Limit:
    """Cuts sorted samples into micro-batches of the least total cost within the limit of tokens."""

    def __init__(self, lengths: Sequence[int], cost: CostModel, max_tokens: int) -> None:
        self._cost = cost
        self._max_tokens = max_tokens
        self._padded = [cost.padded(length) for length in lengths]
        self._work = [cost.row_work(length) for length in lengths]

    def cut(self, rows: Sequence[int], max_work: float) -> MicroBatches:
        """The best cut of `rows`, the longest first; no micro-batch of several rows has more than `max_work`."""
        count = len(rows)
        # Of the rows from here on: the least cost, and how many of them come together then.
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
            # Not every size is tried, but the largest always is; of those within the floor only the last.
            last = bisect_left(_SIZES, most)
            first = max(0, bisect_right(_SIZES, floor / row_work) - 1) if is_padded and row_work > 0 else 0
            least = math.inf
            for size in (*_SIZES[min(first, last) : last], most):
                end = start + size
                if is_padded:
                    work = size * row_work
                    # The others cost no less than what they are without padding, and the more rows, the more is padded.
                    if work + all_work - work_before[end] >= least:
                        break
                    # Where padding of the shorter half costs more than a further micro-batch, so it does for more rows.
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
        return pieces[::-1]  # The shortest rows first, which are seldom the costliest.


def _deal_rows(
    order: Sequence[int], work: Sequence[float], speeds: Sequence[float], places: Sequence[int] | None = None
) -> list[list[int]]:
    """Longest first, each to the rank that would finish it first; `places` limits the numbers of samples."""
    shares: list[list[int]] = [[] for _ in speeds]
    ranks = [rank for rank in range(len(speeds)) if places is None or places[rank]]
    loads = [0.0] * len(speeds)
    for left, i in zip(range(len(order), 0, -1), order, strict=True):
        empty = [rank for rank, share in enumerate(shares) if not share] if left <= len(speeds) else []
        if empty and left <= len(empty) and places is None:
            rank = max(empty, key=lambda r: speeds[r])
        else:
            rank, soonest, more = ranks[0], math.inf, work[i]
            for r in ranks:
                end = (loads[r] + more) / speeds[r]
                if end < soonest:
                    rank, soonest = r, end
        loads[rank] += work[i]
        shares[rank].append(i)
        if places is not None and len(shares[rank]) == places[rank]:
            ranks.remove(rank)
    return shares


def _deal_groups(groups: MicroBatches, problem: _Problem) -> list[MicroBatches]:
    costs = list(map(problem.part_cost, groups))
    shares: list[MicroBatches] = [[] for _ in problem.speeds]
    loads = [0.0] * len(shares)
    for g in sorted(range(len(groups)), key=lambda g: (-costs[g], g)):
        rank = min(range(len(shares)), key=lambda r: ((loads[r] + costs[g]) / problem.speeds[r], r))
        loads[rank] += costs[g]
        shares[rank].append(groups[g])
    return shares


def _deal_slots(order: Sequence[int], slots: Sequence[tuple[int, int]], problem: _Problem) -> list[list[int]]:
    """Neighbours in length fill the slots (rows, rank), the heaviest of one size that of the least loaded rank."""
    shares: list[list[int]] = [[] for _ in problem.speeds]
    loads = [0.0] * len(shares)
    start = 0
    free = list(slots)
    for size, _ in slots:
        part = order[start : start + size]
        start += size
        cost = problem.part_cost(part)
        rank = min((r for s, r in free if s == size), key=lambda r: ((loads[r] + cost) / problem.speeds[r], r))
        free.remove((size, rank))
        loads[rank] += cost
        shares[rank].extend(part)
    return shares


def _improve(plan: list[MicroBatches], problem: _Problem) -> list[MicroBatches]:
    """Moves and exchanges samples between the slowest and the fastest rank while the slowest gets faster."""
    times = [problem.time(rank, share) for rank, share in enumerate(plan)]
    for _ in range(_EXCHANGES_PER_RANK * len(plan)):
        heavy, light = max(range(len(plan)), key=times.__getitem__), min(range(len(plan)), key=times.__getitem__)
        average = sum(t * s for t, s in zip(times, problem.speeds, strict=True)) / sum(problem.speeds)
        if times[heavy] <= _GOOD_ENOUGH * average or heavy == light:
            break
        for new_heavy, new_light in _exchanges(plan, heavy, light, times, problem):
            shares = problem.group(heavy, new_heavy), problem.group(light, new_light)
            found = problem.time(heavy, shares[0]), problem.time(light, shares[1])
            if max(found) < times[heavy]:
                plan[heavy], plan[light] = shares
                times[heavy], times[light] = found
                break
        else:
            break
    return [sorted(share, key=problem.part_cost) for share in plan]


def _exchanges(
    plan: Sequence[MicroBatches], heavy: int, light: int, times: Sequence[float], problem: _Problem
) -> list[tuple[list[int], list[int]]]:
    """A few exchanges, those first whose work comes nearest to what the light rank should take over."""
    work, speeds = problem.work, problem.speeds

    def key(i: int) -> tuple[int, int]:
        return -problem.lengths[i], i

    mine = sorted((i for part in plan[heavy] for i in part), key=key)
    others = sorted((i for part in plan[light] for i in part), key=key)
    wanted = (times[heavy] - times[light]) * speeds[heavy] * speeds[light] / (speeds[heavy] + speeds[light])
    ascending = others[::-1]
    works = [work[i] for i in ascending]
    found: list[tuple[float, int, int | None]] = []
    for i in mine:
        if problem.may_move and len(mine) > 1:
            found.append((work[i], i, None))
        at = bisect_left(works, work[i] - wanted)
        found.extend((work[i] - works[k], i, ascending[k]) for k in (at - 1, at) if 0 <= k < len(works))
    useful = sorted((e for e in found if 0 < e[0] < 2 * wanted), key=lambda e: abs(e[0] - wanted))
    result = []
    for _, i, j in useful[:_TRIED_EXCHANGES]:
        new_heavy = sorted([x for x in mine if x != i] + ([] if j is None else [j]), key=key)
        new_light = sorted([x for x in others if x != j] + [i], key=key)
        result.append((new_heavy, new_light))
    return result
