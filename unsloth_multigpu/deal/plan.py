"""Plans a step so that every rank finishes at the same time, by the cost of micro-batches. Pure: lengths in, plans out.

A micro-batch costs `overhead + max(floor, rows x (L + q L^2))` in units of the time of one token, where `L` is its
longest row: launching kernels takes time (overhead), a small micro-batch does not fill a device (floor), and attention
grows with the square of the length.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest

# Overhead and slope cannot be distinguished with fewer or too similar micro-batches.
_MIN_SAMPLES = 8
_MIN_SPREAD = 2.0
# Smaller differences of speed are noise. Equal shares then keep the plan the same from run to run.
_EQUAL_WITHIN = 1.15
_SPEED_GRID = 0.05
# A candidate is as good as the best one if its squared error exceeds it by at most this many units of noise. Devices
# deviate from the model by about one per cent, in addition to noise.
_DOUBT = 9.0
_SYSTEMATIC = 0.01
# Candidates for overhead and floor, in tokens. No device has needed more than the largest.
_OVERHEADS = (0.0, *(2.0**k for k in range(3, 16)))
_FLOORS = (0.0, *(2.0**k for k in range(8, 16)))
# A micro-batch that takes this many times its predicted time is an outlier, from a compilation or a busy machine.
_OUTLIER = 3.0
# Overhead assumed before anything is measured, so large that a plan never has more micro-batches than in order.
_UNKNOWN_OVERHEAD = 2.0**20
MicroBatches = list[list[int]]
# Numbers of rows of a micro-batch that are tried: four for each doubling, two for larger ones.
_SIZES = sorted({round(2 ** (k / 4)) for k in (*range(12), *range(12, 80, 2))})
# Limits for the cost of a group, as parts of a rank's load, where groups are formed first and then dealt.
_GROUP_PARTS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class CostModel:
    """Cost of a micro-batch in tokens.

    Args:
        overhead_tokens: Constant cost of a micro-batch.
        floor_tokens: Minimum cost of the rows of a micro-batch.
        attention: `q` in `L + q L^2`, per token.
        is_padded: Rows are padded to the longest of their micro-batch; False if a collator packs them.
        pad_multiple: Rows are padded to a multiple of this number.
        is_unknown: Overhead and floor are assumed, not measured.
    """

    overhead_tokens: float = 32.0
    floor_tokens: float = 0.0
    attention: float = 0.0
    is_padded: bool = True
    pad_multiple: int = 1
    is_unknown: bool = False

    def padded(self, length: int) -> int:
        """Returns the padded length of a row that is the longest of its micro-batch."""
        return -(-length // self.pad_multiple) * self.pad_multiple if self.is_padded else length

    def row_work(self, length: int) -> float:
        """Returns the cost of one row that is the longest of its micro-batch."""
        tokens = self.padded(length)
        return tokens + self.attention * tokens * tokens

    def work(self, lengths: Sequence[int]) -> float:
        """Returns the cost of the rows of a micro-batch, without overhead and floor."""
        if self.is_padded:
            return len(lengths) * self.row_work(max(lengths))
        return sum(self.row_work(length) for length in lengths)

    def tokens(self, lengths: Sequence[int]) -> int:
        """Returns the tokens of a micro-batch, padding included."""
        return len(lengths) * self.padded(max(lengths)) if self.is_padded else sum(lengths)

    def of_work(self, work: float) -> float:
        """Returns the cost of a micro-batch whose rows cost `work`."""
        return self.overhead_tokens + max(self.floor_tokens, work)

    def to_plan_with(self) -> CostModel:
        """Returns the model for planning: if the overhead is unknown, plans get no additional micro-batches."""
        return replace(self, overhead_tokens=_UNKNOWN_OVERHEAD) if self.is_unknown else self

    def of(self, lengths: Sequence[int]) -> float:
        """Returns the cost of a micro-batch with rows of these lengths."""
        return self.of_work(self.work(lengths))


def fit_cost(model: CostModel, samples: Sequence[tuple[float, float]]) -> CostModel:
    """Fits overhead and floor to measured micro-batches: work in tokens and seconds of each.

    Candidates are powers of two, so that the plan does not change with small differences of measurements. With too few
    samples the model is returned unchanged.
    """
    works = sorted(work for work, _ in samples)
    if len(works) < _MIN_SAMPLES or works[-1] < _MIN_SPREAD * max(works[0], 1.0):
        return model
    samples = without_outliers(model, samples)
    candidates = [
        replace(model, overhead_tokens=overhead, floor_tokens=floor, is_unknown=False)
        for overhead in _OVERHEADS
        for floor in _FLOORS
        if overhead <= 1.5 * works[-1] and (not floor or works[0] < floor < works[-1] / _MIN_SPREAD)
    ]
    errors = [_error(candidate, samples) for candidate in candidates]
    limit = min(errors) * (1 + _DOUBT / len(samples)) + len(samples) * _SYSTEMATIC**2
    good = (candidate for candidate, error in zip(candidates, errors, strict=True) if error <= limit)
    # The most expensive of them, because too many micro-batches cost more than too few.
    return max(good, key=lambda candidate: (candidate.of_work(0), candidate.overhead_tokens))


def _error(model: CostModel, samples: Sequence[tuple[float, float]]) -> float:
    """Returns the squared relative error of `scale x cost` against the measured seconds, with the best scale."""
    ratios = [model.of_work(work) / seconds for work, seconds in samples if seconds > 0]
    return max(0.0, len(ratios) - sum(ratios) ** 2 / sum(ratio * ratio for ratio in ratios))


def without_outliers(model: CostModel, samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Removes micro-batches that took far longer than predicted by `model`, and than most others."""
    usual = statistics.median(seconds / model.of_work(work) for work, seconds in samples)
    middle = statistics.median(seconds for _, seconds in samples)
    # Small micro-batches may take as long as others: they show overhead and floor.
    kept = [(work, s) for work, s in samples if s <= _OUTLIER * max(usual * model.of_work(work), middle)]
    return kept or list(samples)


def relative_speeds(rates: Sequence[float]) -> tuple[float, ...]:
    """Returns the speed of each rank relative to the fastest, given the cost per second of each; 0 = not measured.

    Speeds are rounded, and equal if the difference is small, so that equal devices get equal shares.
    """
    if min(rates) <= 0 or max(rates) < _EQUAL_WITHIN * min(rates):
        return (1.0,) * len(rates)
    return tuple(max(_SPEED_GRID, round(round(r / max(rates) / _SPEED_GRID) * _SPEED_GRID, 4)) for r in rates)


def plan_step(lengths: Sequence[int], speeds: Sequence[float], cost: CostModel, max_tokens: int) -> list[MicroBatches]:
    """Splits one optimizer step's samples so that every rank finishes at the same time.

    Samples go to ranks longest first, each to the rank that would finish it first. If ranks are equally fast and only
    rows cost, the slowest is within 4/3 of the optimum (Graham 1969, "Bounds on Multiprocessing Timing Anomalies").
    Each rank's samples, sorted, are then cut into micro-batches by dynamic programming. Other plans cut first and deal
    the groups; the fastest plan is returned.

    Args:
        lengths: Tokens of each sample without padding; position = index in the step.
        speeds: Relative speed of each rank.
        max_tokens: Upper limit of the tokens of one micro-batch, padding included. A longer sample is alone.

    Returns:
        `plan[rank][micro_batch]` = indices into `lengths`, the costliest micro-batch of a rank last, since its backward
        pass hides the exchange of gradients best. Every index occurs once. A rank gets no samples if there are too few.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    work = [cost.row_work(length) for length in lengths]
    plans = [[_cut(rows, lengths, cost, max_tokens, math.inf) for rows in _dealt(order, work, speeds, fills=True)]]
    load = sum(work) / sum(speeds) * min(speeds)
    for part in _GROUP_PARTS:
        groups = _cut(order, lengths, cost, max_tokens, part * load)
        dealt = _deal_groups(groups, lengths, speeds, cost)
        # A rank without a sample would compute a filler, and its speed would no longer be measured.
        plans += [dealt] if all(dealt) else []
    fastest = min(plans, key=lambda plan: step_time(plan, lengths, speeds, cost))
    return [sorted(share, key=lambda rows: cost.of([lengths[i] for i in rows])) for share in fastest]


def deal_micro_batches(
    lengths: Sequence[int], num_rows: int, speeds: Sequence[float], cost: CostModel
) -> list[MicroBatches]:
    """Returns a plan of micro-batches of `num_rows` samples of similar length, for losses that are means over these."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups = [order[begin : begin + num_rows] for begin in range(0, len(order), num_rows)]
    return _deal_groups(groups, lengths, speeds, cost)


def step_time(
    plan: Sequence[MicroBatches],
    lengths: Sequence[int],
    speeds: Sequence[float],
    cost: CostModel,
    *,
    is_lockstep: bool = False,
) -> float:
    """Returns the time of a step, in tokens: that of the slowest rank.

    With `is_lockstep`, ranks wait for each other in every micro-batch, as sharded ranks do: `sum_k max_r cost(r, k)`
    instead of `max_r sum_k cost(r, k)`. The costliest micro-batches of all ranks are computed at the same time. A rank
    with fewer micro-batches computes fillers.
    """
    times = [
        sorted((cost.of([lengths[i] for i in rows]) / speed for rows in share), reverse=True)
        for share, speed in zip(plan, speeds, strict=True)
    ]
    if not is_lockstep:
        return float(max(map(sum, times)))
    filler = cost.of([min(lengths)]) / min(speeds)
    return float(sum(map(max, zip_longest(*times, fillvalue=filler))))


def _cut(
    rows: Sequence[int], lengths: Sequence[int], cost: CostModel, max_tokens: int, max_work: float
) -> MicroBatches:
    """Cuts samples, the longest first, into micro-batches with the lowest total cost, by dynamic programming.

    `max_work` limits micro-batches of several rows.
    """
    count = len(rows)
    tokens, work = [cost.padded(lengths[i]) for i in rows], [cost.row_work(lengths[i]) for i in rows]
    tokens_before, work_before = [0, *accumulate(tokens)], [0.0, *accumulate(work)]
    # For the rows from each index on: the lowest cost, and the number of rows of the first micro-batch.
    best, size_of = [math.inf] * count + [0.0], [0] * count
    for start in range(count - 1, -1, -1):
        if cost.is_padded:
            most = min(max_tokens // max(1, tokens[start]), max_work // max(1.0, work[start]))
        else:
            end = bisect_right(tokens_before, tokens_before[start] + max_tokens)
            most = min(end, bisect_right(work_before, work_before[start] + max_work)) - 1 - start
        most = max(1, min(int(most), count - start))
        # Not all sizes are tried, but always the maximum.
        for size in (*_SIZES[: bisect_left(_SIZES, most)], most):
            end = start + size
            of_rows = size * work[start] if cost.is_padded else work_before[end] - work_before[start]
            if (value := cost.of_work(of_rows) + best[end]) < best[start]:
                best[start], size_of[start] = value, size
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
        empty = [rank for rank, share in enumerate(shares) if not share] if fills else []
        if empty and num_left <= len(empty):
            rank = max(empty, key=lambda r: speeds[r])
        else:
            rank = min(range(len(loads)), key=lambda r: (loads[r] + work[i]) / speeds[r])
        loads[rank] += work[i]
        shares[rank].append(i)
    return shares
