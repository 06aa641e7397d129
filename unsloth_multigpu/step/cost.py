"""What a micro-batch costs, in the time of one token, and how that is found out. Pure.

A micro-batch costs `overhead + max(floor, rows x (L + q L^2))`, `L` its longest row: kernels have to be launched
however little they have to do (overhead), a device is not full below some size (floor), and attention grows with the
square.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

# With fewer micro-batches, or too similar ones, overhead and slope cannot be told apart.
_MIN_SAMPLES = 8
_MIN_SPREAD = 2.0
# Ranks whose speeds differ by less get equal shares: it is noise, and the plan stays the same from run to run.
_EQUAL_WITHIN = 1.15
_SPEED_GRID = 0.05
# An explanation with one more number is accepted only if its error is so much smaller.
_CLEARLY = 0.8
# What attention may cost, over what the shape of the model says.
_ATTENTION_FACTORS = (0.25, 0.5, 2.0, 4.0, 8.0)
# Work of this many times overhead and floor can be told from them.
_WORK_SHOWS = 2.0
# Micro-batches are never cut so small that a smaller overhead would matter.
_NEGLIGIBLE = 128.0
# Candidates for the overhead and the floor of a device, in tokens. No device has needed more than the largest.
_OVERHEADS = (0.0, *(2.0**k for k in range(5, 16)))
_FLOORS = (0.0, *(2.0**k for k in range(8, 16)), 2.0**20)
# A candidate is refuted if its squared error exceeds the smallest one by this many units of noise; 9 are three sigma.
# A device differs from the model by some per cent, whatever the noise is.
_DOUBT = 9.0
_SYSTEMATIC = 0.01
# A micro-batch that took this many times its predicted time met something else: a compilation, a busy machine.
_OUTLIER = 3.0


# Before anything is measured.
ANY_COST = tuple((0.0, floor) for floor in _FLOORS)


@dataclass(frozen=True)
class CostModel:
    """Cost of a micro-batch in tokens.

    Args:
        overhead_tokens: What each micro-batch costs whatever is in it (`c0`).
        floor_tokens: Less work than this takes as long as this.
        attention: The `q` of `L + q L^2`, per token.
        is_padded: Rows are padded to the longest of their micro-batch; False where a collator lays them end to end.
        pad_multiple: Rows are padded to a multiple of it.
        is_joined: Rows that lie end to end are one row to attention, of which most is masked.
        possible: Overheads and floors that may be the true ones as far as is known: a plan has to suit them all. Empty
            where the model's own are taken for true.
    """

    overhead_tokens: float = 32.0
    floor_tokens: float = 0.0
    attention: float = 0.0
    is_padded: bool = True
    pad_multiple: int = 1
    is_joined: bool = False
    possible: tuple[tuple[float, float], ...] = ()

    def padded(self, length: int) -> int:
        """Tokens of a row when it is the longest."""
        return -(-length // self.pad_multiple) * self.pad_multiple if self.is_padded else length

    def row_work(self, length: int) -> float:
        """Cost of one row that is not padded further."""
        tokens = self.padded(length)
        return tokens + self.attention * tokens * tokens

    def work(self, lengths: Sequence[int]) -> float:
        """Cost of the rows of one micro-batch, without overhead and floor."""
        if self.is_padded:
            return len(lengths) * self.row_work(max(lengths))
        if self.is_joined:
            return self.row_work(sum(lengths))
        return sum(self.row_work(length) for length in lengths)

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens that a micro-batch holds in memory, padding included."""
        return len(lengths) * self.padded(max(lengths)) if self.is_padded else sum(lengths)

    def of_work(self, work: float) -> float:
        """Cost of a micro-batch whose rows cost `work`."""
        return self.overhead_tokens + max(self.floor_tokens, work)

    def of(self, lengths: Sequence[int]) -> float:
        """Cost of a micro-batch with rows of these lengths."""
        return self.of_work(self.work(lengths))


def attention_factor(
    hidden_size: int, num_layers: int, num_weights: int, *, is_frozen: bool, is_causal: bool = False
) -> float:
    """The `q` of `L + q L^2`: operations of attention per token and context token, over those of the matrices.

    Forward, a token costs `2 num_weights` in the matrices and `4 hidden_size num_layers` per context token in attention
    (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1). Backward, attention costs twice as much;
    so do the matrices, but once where their weights are frozen. Fused causal kernels skip the half that is masked.

    Args:
        hidden_size: Of the model.
        num_layers: Of the model.
        num_weights: Elements of the matrices that each token is multiplied with.
        is_frozen: Their weights get no gradient, as with LoRA.
        is_causal: Tokens attend to those before them, in a kernel that computes no others.
    """
    attention = 3 * 4 * hidden_size * num_layers * (0.5 if is_causal else 1.0)
    matrices = (2 if is_frozen else 3) * 2 * num_weights
    return attention / matrices if num_weights else 0.0


def fit_cost(model: CostModel, samples: Sequence[tuple[float, float]]) -> CostModel:
    """Finds overhead and floor from measured micro-batches.

    Both are rounded to powers of two: the plan is not to change with each small difference of a measurement.

    Args:
        model: What was assumed so far; returned unchanged where the samples cannot tell.
        samples: Work of each micro-batch in tokens, and its seconds.
    """
    works = sorted(work for work, _ in samples)
    if len(works) < _MIN_SAMPLES or works[-1] < _MIN_SPREAD * max(works[0], 1.0):
        return model
    samples = without_outliers(model, samples)
    line = _best_line(samples)
    # If launching takes longer than computing, all micro-batches take the same time and the slope is noise of either
    # sign. Then all of the measured time is overhead.
    if line.slope * works[-1] <= line.intercept:
        found = replace(model, overhead_tokens=_power_of_two(works[-1]), floor_tokens=0.0)
    else:
        found = replace(model, overhead_tokens=_power_of_two(line.intercept / line.slope), floor_tokens=line.floor)
    return replace(found, possible=_possible(samples)) if model.possible else found


def fit_time(model: CostModel, samples: Sequence[tuple[Sequence[int], float]]) -> tuple[CostModel, float]:
    """What micro-batches cost, not rounded, and the seconds of a token: for a forecast of time, not for a plan.

    What attention costs is known from the shape of a model, and not from its kernels: those that know no ends of rows
    compute a joined micro-batch whole, and mask it. Other factors are taken where they clearly fit better.

    Args:
        model: What was assumed so far. It stays where the samples cannot tell.
        samples: Lengths of the rows of each micro-batch, and its seconds; at least one.
    """
    kept = set(without_outliers(model, [(model.work(lengths), seconds) for lengths, seconds in samples]))
    samples = [sample for sample in samples if (model.work(sample[0]), sample[1]) in kept]
    works = sorted(model.work(lengths) for lengths, _ in samples)
    if len(works) < _MIN_SAMPLES or works[-1] < _MIN_SPREAD * max(works[0], 1.0):
        return model, statistics.median(seconds / model.of(lengths) for lengths, seconds in samples)
    factors = [replace(model, attention=model.attention * factor) for factor in _ATTENTION_FACTORS]
    joined = [] if model.is_padded else [replace(m, is_joined=True) for m in (model, *factors)]
    tried = {m: _best_line([(m.work(lengths), s) for lengths, s in samples]) for m in (model, *factors, *joined)}
    best = min(tried, key=lambda m: tried[m].error)
    if tried[best].error > _CLEARLY * tried[model].error:
        best = model
    line = tried[best]
    if line.slope <= 0:  # All took the same time, whatever was in them.
        most, seconds = works[-1], statistics.median(seconds for _, seconds in samples)
        return replace(model, overhead_tokens=0.0, floor_tokens=most), seconds / most
    return replace(best, overhead_tokens=line.intercept / line.slope, floor_tokens=line.floor), line.slope


def _best_line(samples: Sequence[tuple[float, float]]) -> _Line:
    """With a floor where it fits clearly better than without one."""
    works = sorted(work for work, _ in samples)
    no_floor = _fit_line(samples, 0.0)
    floors = [2.0**k for k in range(1, 20) if works[0] < 2.0**k < works[-1] / _MIN_SPREAD] or [0.0]
    best = min((_fit_line(samples, floor) for floor in floors), key=lambda line: line.error)
    return best if best.error < _CLEARLY * no_floor.error else no_floor


def is_settled(model: CostModel, samples: Sequence[tuple[float, float]]) -> bool:
    """True where overhead and floor are known: some micro-batch did far more, and what is possible differs little."""
    least = [max(_NEGLIGIBLE, overhead + floor) for overhead, floor in model.possible] or [1.0]
    is_seen = max(work for work, _ in samples) >= _WORK_SHOWS * (model.overhead_tokens + model.floor_tokens)
    return is_seen and max(least) <= _WORK_SHOWS * min(least)


def _possible(samples: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Overheads and floors that explain the samples not clearly worse than the best do; the outermost of each floor."""
    points = [(work, seconds, seconds**-2) for work, seconds in samples if seconds > 0]
    y, yy = sum(w * s for _, s, w in points), sum(w * s * s for _, s, w in points)
    total, most = sum(w for _, _, w in points), max(work for work, _, _ in points)
    errors: dict[tuple[float, float], float] = {}
    for floor in (f for f in _FLOORS if f < 2 * most or f == _FLOORS[-1]):
        xs = [(max(floor, work), seconds, w) for work, seconds, w in points]
        x, xx = sum(w * v for v, _, w in xs), sum(w * v * v for v, _, w in xs)
        xy = sum(w * v * seconds for v, seconds, w in xs)
        for overhead in _OVERHEADS:
            # Least squares of the relative error of seconds = scale x (overhead + max(floor, work)).
            cross, square = overhead * y + xy, overhead * overhead * total + 2 * overhead * x + xx
            errors[overhead, floor] = yy - cross * cross / square
    n = len(points)
    # The noise of few samples is itself uncertain: use quantiles of Student's distribution instead of the normal one.
    freedom = max(1, n - 2)
    limit = min(errors.values()) * (1 + _DOUBT * (1 + 10 / freedom) / freedom) + n * _SYSTEMATIC**2
    kept = [pair for pair, error in errors.items() if error <= limit]
    outermost = {f: [o for o, g in kept if g == f] for f in {g for _, g in kept}}
    return tuple(sorted({(o, f) for f, os in outermost.items() for o in (min(os), max(os))}))


def without_outliers(model: CostModel, samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leaves out micro-batches that took far longer than `model` says, and than most others did."""
    usual = statistics.median(seconds / model.of_work(work) for work, seconds in samples)
    middle = statistics.median(seconds for _, seconds in samples)
    # Small ones may take as long as others: overhead and floor are found from them.
    kept = [(work, s) for work, s in samples if s <= _OUTLIER * max(usual * model.of_work(work), middle)]
    return kept or list(samples)


def relative_speeds(rates: Sequence[float]) -> tuple[float, ...]:
    """Speed of each rank, the fastest 1.

    Rounded, and equal where the difference is small, so that like devices get like plans.

    Args:
        rates: Cost that each rank computes in a second, waiting for others excluded; 0 = not measured.
    """
    if min(rates) <= 0 or max(rates) < _EQUAL_WITHIN * min(rates):
        return (1.0,) * len(rates)
    return tuple(max(_SPEED_GRID, round(round(r / max(rates) / _SPEED_GRID) * _SPEED_GRID, 4)) for r in rates)


@dataclass(frozen=True)
class _Line:
    floor: float
    slope: float
    intercept: float
    error: float


def _fit_line(samples: Sequence[tuple[float, float]], floor: float) -> _Line:
    """Least squares of the relative error of `intercept + slope x max(floor, work)`, neither below zero."""
    points = [(max(floor, work), seconds, seconds**-2) for work, seconds in samples if seconds > 0]
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread if spread else 0.0
    intercept = mean_y - slope * mean_x
    if intercept < 0:
        intercept = 0.0
        slope = sum(w * x * y for x, y, w in points) / sum(w * x * x for x, _, w in points)
    return _Line(floor, slope, intercept, sum(w * (intercept + slope * x - y) ** 2 for x, y, w in points))


def _power_of_two(value: float) -> float:
    if value < 1:
        return 0.0
    power = 1.0
    while power * 2**0.5 < value:
        power *= 2
    return power
