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
from itertools import accumulate

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
# Overhead and floor are known if some work exceeds them by this factor.
_WORK_SHOWS = 2.0
# Candidates for overhead and floor, in tokens. No device has needed more than the largest.
_OVERHEADS = (0.0, *(2.0**k for k in range(3, 16)))
_FLOORS = (0.0, *(2.0**k for k in range(8, 16)), 2.0**20)
# A micro-batch that takes this many times its predicted time is an outlier, from a compilation or a busy machine.
_OUTLIER = 3.0
# Overhead assumed before anything is measured, so large that a plan never has more micro-batches than in order.
_UNKNOWN_OVERHEAD = 2.0**20
MicroBatches = list[list[int]]
# Numbers of rows of a micro-batch that are tried: four for each doubling, two for larger ones.
_SIZES = sorted({round(2 ** (k / 4)) for k in (*range(12), *range(12, 80, 2))})
# Limits for the size of a group, as parts of a rank's load, if whole groups are dealt. For many samples one is enough.
_GROUP_PARTS = (1.0, 0.5, 0.25)
_MANY_SAMPLES = 256


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
    most = works[-1]
    errors = {
        (overhead, floor): error
        for (overhead, floor), error in _errors(samples).items()
        if overhead <= 1.5 * most and (not floor or works[0] < floor < most / _MIN_SPREAD)
    }
    limit = min(errors.values()) * (1 + _DOUBT / len(samples)) + len(samples) * _SYSTEMATIC**2
    # The most expensive of the good candidates, because too many micro-batches cost more than too few.
    best = max((pair for pair, error in errors.items() if error <= limit), key=sum)
    return replace(model, overhead_tokens=best[0], floor_tokens=best[1], is_unknown=False)


def is_settled(model: CostModel, samples: Sequence[tuple[float, float]]) -> bool:
    """True if overhead and floor are known, because some micro-batch had much more work."""
    is_seen = max(work for work, _ in samples) >= _WORK_SHOWS * (model.overhead_tokens + model.floor_tokens)
    return is_seen and not model.is_unknown


def _errors(samples: Sequence[tuple[float, float]]) -> dict[tuple[float, float], float]:
    """Returns the squared relative error of each candidate (overhead, floor), with the best scale.

    The model is `seconds = scale x (overhead + max(floor, work))`.
    """
    points = [(work, seconds, seconds**-2) for work, seconds in samples if seconds > 0]
    y, yy = sum(w * s for _, s, w in points), sum(w * s * s for _, s, w in points)
    total, most = sum(w for _, _, w in points), max(work for work, _, _ in points)
    errors: dict[tuple[float, float], float] = {}
    for floor in (f for f in _FLOORS if f < 2 * most or f == _FLOORS[-1]):
        xs = [(max(floor, work), seconds, w) for work, seconds, w in points]
        x, xx = sum(w * v for v, _, w in xs), sum(w * v * v for v, _, w in xs)
        xy = sum(w * v * seconds for v, seconds, w in xs)
        for overhead in _OVERHEADS:
            cross, square = overhead * y + xy, overhead * overhead * total + 2 * overhead * x + xx
            errors[overhead, floor] = max(0.0, yy - cross * cross / square)
    return errors


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
    """Returns a plan of micro-batches of `num_rows` samples of similar length, for losses that are means over these."""
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
