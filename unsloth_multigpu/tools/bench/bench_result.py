"""What a benchmark found: the figures that are made of what the ranks wrote. Pure.

The record of a rank, as JSON, has `steps`; `gradient_norms`, one of each step, none where each rank has gradients of
its own; `peak_bytes`, the most memory that it held; `sent_bytes`, for gradients and weights in the whole training, null
where that is not known; `planner`, what our planner had measured at the end; `rank` and `device`.

A step has `wall_s`, from the end of the one before to its own; `cpu_s` of the process in the same span; `compute_s` in
forward and backward, without waiting for other ranks; `micro_batches`, of each its rows, the longest row and the tokens
that are no padding; `samples`, the hashes of the rows (`fingerprint`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from unsloth_multigpu.tools.bench.arm import BASELINES, REFERENCE
from unsloth_multigpu.tools.bench.bench_option import BenchOptions

Record = Mapping[str, Any]
# runs[arm][round] = records of its ranks
Runs = Mapping[str, Sequence[Sequence[Record]]]


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """At least one value is needed."""
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True)
class ArmResult:
    """An arm over all rounds, over its timed steps.

    Args:
        tokens_per_s: Tokens that are no padding, of all ranks, per second.
        times: Name of another arm, one of `BASELINES` -> tokens per second divided by its in the same round.
        padding_share: Part of the computed tokens that is padding.
        waiting_share: Part of the ranks' time between the slowest one's end and their own; see `waiting_share`.
        cpu_s: CPU time of the slowest rank of each step, summed: what the run takes on a quiet machine.
        peak_bytes: The most memory of one rank.
        norm_difference: Largest relative difference of a step's gradient norm from the one-process run; None where that
            was not run, where the samples are others, since the gradients are then, too, and where each rank has its
            own.
        has_same_samples: Every step has the samples that it has in one process, over all ranks; None = not known.
        sent_bytes_per_step: Of the rank that sends most; None = not known.
    """

    name: str
    tokens_per_s: Spread
    times: Mapping[str, Spread]
    padding_share: Spread
    waiting_share: Spread
    cpu_s: Spread
    peak_bytes: int
    norm_difference: float | None
    has_same_samples: bool | None
    sent_bytes_per_step: float | None = None


def summarize(runs: Runs, options: BenchOptions) -> list[ArmResult]:
    """One result per arm, in the order of `runs`."""
    measures = {name: [measure_run(ranks, options) for ranks in rounds] for name, rounds in runs.items()}
    speeds = {name: [measure["tokens_per_s"] for measure in rounds] for name, rounds in measures.items()}
    results = []
    for name, rounds in measures.items():
        spreads: dict[str, Any] = {figure: Spread.of(measure[figure] for measure in rounds) for figure in rounds[0]}
        ranks = [rank for ranks in runs[name] for rank in ranks]
        results.append(
            ArmResult(
                name=name,
                **spreads,
                times={other: ratios(speeds[name], speeds[other]) for other in BASELINES if other in speeds},
                peak_bytes=max(rank["peak_bytes"] for rank in ranks),
                sent_bytes_per_step=_sent_per_step(ranks),
                **_compared(runs[name], runs.get(REFERENCE)),
            )
        )
    return results


def measure_run(ranks: Sequence[Record], options: BenchOptions) -> dict[str, float]:
    """Figures of one run, without its warm-up; see `ArmResult`."""
    timed = [rank["steps"][options.num_warmup :] for rank in ranks]
    steps = list(zip(*timed, strict=True))
    sizes = [size for rank in timed for step in rank for size in step["micro_batches"]]
    num_tokens = sum(tokens for _, _, tokens in sizes)
    # Of the whole run: who is late in one step may be early in the next.
    wall_s = max(sum(step["wall_s"] for step in rank) for rank in timed)
    return {
        "tokens_per_s": num_tokens / wall_s,
        "padding_share": 1 - num_tokens / sum(rows * longest for rows, longest, _ in sizes),
        "waiting_share": waiting_share([[rank["compute_s"] for rank in step] for step in steps]),
        "cpu_s": sum(max(rank["cpu_s"] for rank in step) for step in steps),
    }


def waiting_share(compute_s: Sequence[Sequence[float]]) -> float:
    """Part of the ranks' time that they wait for the slowest: sum(max - mean) / sum(max) over the steps.

    Args:
        compute_s: `compute_s[step][rank]` in seconds.
    """
    slowest = sum(max(ranks) for ranks in compute_s)
    return sum(max(ranks) - sum(ranks) / len(ranks) for ranks in compute_s) / slowest


def ratios(mine: Sequence[float], other: Sequence[float]) -> Spread:
    """Spread of the ratios within each round: what slows a whole round down cancels out."""
    return Spread.of(m / o for m, o in zip(mine, other, strict=True))


def _compared(rounds: Sequence[Sequence[Record]], reference: Sequence[Sequence[Record]] | None) -> dict[str, Any]:
    """Samples and gradients against those of one process."""
    if reference is None:
        return {"has_same_samples": None, "norm_difference": None}
    pairs = list(zip(rounds, reference, strict=True))
    is_same = all(_samples_of_steps(mine) == _samples_of_steps(other) for mine, other in pairs)
    norms = [
        norm_difference(mine[0]["gradient_norms"], other[0]["gradient_norms"])
        for mine, other in pairs
        if mine[0]["gradient_norms"]
    ]
    return {"has_same_samples": is_same, "norm_difference": max(norms) if is_same and norms else None}


def _samples_of_steps(ranks: Sequence[Record]) -> list[list[str]]:
    """The samples of each step over all ranks, sorted: how often each was computed."""
    return [
        sorted(s for rank in step for s in rank["samples"]) for step in zip(*(r["steps"] for r in ranks), strict=True)
    ]


def norm_difference(mine: Sequence[float], other: Sequence[float]) -> float:
    """Largest relative difference over the steps; infinite where a norm is no number."""
    differences = [abs(m - o) / abs(o) if o else abs(m) for m, o in zip(mine, other, strict=True)]
    return max(d if math.isfinite(d) else math.inf for d in differences)


def _sent_per_step(ranks: Sequence[Record]) -> float | None:
    sent = [rank["sent_bytes"] / len(rank["steps"]) for rank in ranks if rank["sent_bytes"] is not None]
    return max(sent) if len(sent) == len(ranks) else None
