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
# A candidate is as good as the best one if its squared error is larger by no more than this many units of noise. A
# device differs from the model by some per cent, whatever the noise is.
_DOUBT = 9.0
_SYSTEMATIC = 0.01
# Work of this many times overhead and floor can be told from them.
_WORK_SHOWS = 2.0
# Candidates for the overhead and the floor of a device, in tokens. No device has needed more than the largest.
_OVERHEADS = (0.0, *(2.0**k for k in range(3, 16)))
_FLOORS = (0.0, *(2.0**k for k in range(8, 16)), 2.0**20)
# A micro-batch that took this many times its predicted time met something else: a compilation, a busy machine.
_OUTLIER = 3.0
# The overhead of a device on which nothing is measured yet: a plan of more micro-batches is not worth it.
_UNKNOWN_OVERHEAD = 2.0**20


@dataclass(frozen=True)
class CostModel:
    """Cost of a micro-batch in tokens.

    Args:
        overhead_tokens: What each micro-batch costs whatever is in it (`c0`).
        floor_tokens: Less work than this takes as long as this.
        attention: The `q` of `L + q L^2`, per token.
        is_padded: Rows are padded to the longest of their micro-batch; False where a collator lays them end to end.
        pad_multiple: Rows are padded to a multiple of it.
        is_unknown: Overhead and floor are assumed, and those of the device may be far larger.
    """

    overhead_tokens: float = 32.0
    floor_tokens: float = 0.0
    attention: float = 0.0
    is_padded: bool = True
    pad_multiple: int = 1
    is_unknown: bool = False

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
        return sum(self.row_work(length) for length in lengths)

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens that a micro-batch holds in memory, padding included."""
        return len(lengths) * self.padded(max(lengths)) if self.is_padded else sum(lengths)

    def of_work(self, work: float) -> float:
        """Cost of a micro-batch whose rows cost `work`."""
        return self.overhead_tokens + max(self.floor_tokens, work)

    def to_plan_with(self) -> CostModel:
        """The same, with an overhead for which no rank gets more micro-batches than in order, where it is unknown."""
        return replace(self, overhead_tokens=_UNKNOWN_OVERHEAD) if self.is_unknown else self

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

    Candidates are powers of two: the plan is not to change with each small difference of a measurement.

    Args:
        model: What was assumed so far; returned unchanged where the samples cannot tell.
        samples: Work of each micro-batch in tokens, and its seconds.
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
    # The most costly one that explains them: a plan of too many micro-batches loses more than one of too few.
    best = max((pair for pair, error in errors.items() if error <= limit), key=sum)
    return replace(model, overhead_tokens=best[0], floor_tokens=best[1], is_unknown=False)


def is_settled(model: CostModel, samples: Sequence[tuple[float, float]]) -> bool:
    """True where overhead and floor are known: some micro-batch did far more."""
    is_seen = max(work for work, _ in samples) >= _WORK_SHOWS * (model.overhead_tokens + model.floor_tokens)
    return is_seen and not model.is_unknown


def _errors(samples: Sequence[tuple[float, float]]) -> dict[tuple[float, float], float]:
    """How badly each candidate (overhead, floor) explains the samples.

    It is the least squared relative error of `seconds = scale x (overhead + max(floor, work))` over all scales.
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
