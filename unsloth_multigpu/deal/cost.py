"""The cost model of a micro-batch, in units of the time of one token, and how it is fitted. Pure.

A micro-batch costs `overhead + max(floor, rows x (L + q L^2))`, where `L` is its longest row: launching kernels takes
time (overhead), a small micro-batch does not fill a device (floor), and attention grows with the square of the length.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def attention_factor(
    hidden_size: int, num_layers: int, num_weights: int, *, is_frozen: bool, is_causal: bool = False
) -> float:
    """Returns `q` of `L + q L^2`: FLOPs of attention per token and context token, divided by FLOPs of the matrices.

    In the forward pass, a token costs `2 num_weights` in the matrices and `4 hidden_size num_layers` per context token
    in attention (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1). The backward pass costs twice
    as much, but for frozen matrices, as with LoRA, as much as the forward pass. Fused causal kernels skip the masked
    half. `num_weights` are the elements of the matrices that each token is multiplied with.
    """
    attention = 3 * 4 * hidden_size * num_layers * (0.5 if is_causal else 1.0)
    matrices = (2 if is_frozen else 3) * 2 * num_weights
    return attention / matrices if num_weights else 0.0


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
