"""The figures of a benchmark: computed from the records of the ranks, and printed as a table.

The record of a rank, as JSON, has `steps`; `gradient_norms`, one per step, none if each rank has gradients of its own;
`peak_bytes`, its peak memory; `sent_bytes` of gradients and weights in the whole training, null if not known;
`planner`, the planner's measurements; `rank` and `device`.

A step has `wall_s`, from the end of the step before; `cpu_s` of the process in the same time; `compute_s` of forward
and backward, without waiting for other ranks; `micro_batches` as (rows, longest row, tokens without padding);
`samples`, the hashes of the rows (`fingerprint`).
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.tools.bench.arm import ARMS, BASELINES, REFERENCE, BenchOptions
from unsloth_multigpu.versions import installed_version

Record = Mapping[str, Any]
# runs[arm][round] = records of its ranks
Runs = Mapping[str, Sequence[Sequence[Record]]]
_LIBRARIES = ("unsloth-multigpu", "torch", "transformers", "accelerate", "peft", "datasets")
_NOT_SHOWN = ("arms", "device", "json", "timeout_s", "model_folder", "is_gpu_shared")
_BAR_WIDTH = 60


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarizes one value or more."""
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True)
class ArmResult:
    """Figures of an arm over the timed steps of all rounds.

    Args:
        tokens_per_s: Tokens without padding, of all ranks, per second.
        times: For each arm of `BASELINES` that ran: tokens per second divided by those of that arm in the same round.
        padding_share: Fraction of the computed tokens that is padding.
        waiting_share: Fraction of the ranks' time spent waiting for the slowest one; see `waiting_share`.
        cpu_s: CPU time of the slowest rank of each step, summed: the time of the run on an idle machine.
        peak_bytes: Peak memory of a rank.
        norm_difference: Largest relative difference of a step's gradient norm from the one-process run; None without
            that run, if the samples differ, or if each rank has gradients of its own.
        has_same_samples: Every step has the same samples as in one process, over all ranks; None = not known.
        sent_bytes_per_step: Bytes of the rank that sends most; None = not known.
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
    """Returns one result per arm, in the order of `runs`."""
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
    """Returns the figures of one run without its warm-up; see `ArmResult`."""
    timed = [rank["steps"][options.num_warmup :] for rank in ranks]
    steps = list(zip(*timed, strict=True))
    sizes = [size for rank in timed for step in rank for size in step["micro_batches"]]
    num_tokens = sum(tokens for _, _, tokens in sizes)
    # Over the whole run, because ranks may be late in one step and early in the next.
    wall_s = max(sum(step["wall_s"] for step in rank) for rank in timed)
    return {
        "tokens_per_s": num_tokens / wall_s,
        "padding_share": 1 - num_tokens / sum(rows * longest for rows, longest, _ in sizes),
        "waiting_share": waiting_share([[rank["compute_s"] for rank in step] for step in steps]),
        "cpu_s": sum(max(rank["cpu_s"] for rank in step) for step in steps),
    }


def waiting_share(compute_s: Sequence[Sequence[float]]) -> float:
    """Returns the fraction of the ranks' time spent waiting for the slowest: sum(max - mean) / sum(max) over steps.

    `compute_s[step][rank]` are seconds.
    """
    slowest = sum(max(ranks) for ranks in compute_s)
    return sum(max(ranks) - sum(ranks) / len(ranks) for ranks in compute_s) / slowest


def ratios(mine: Sequence[float], other: Sequence[float]) -> Spread:
    """Returns the spread of the ratios within each round, in which a slow round cancels out."""
    return Spread.of(m / o for m, o in zip(mine, other, strict=True))


def _compared(rounds: Sequence[Sequence[Record]], reference: Sequence[Sequence[Record]] | None) -> dict[str, Any]:
    """Compares samples and gradient norms with those of one process."""
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
    """Returns the samples of each step over all ranks, sorted, with repetitions."""
    return [
        sorted(s for rank in step for s in rank["samples"]) for step in zip(*(r["steps"] for r in ranks), strict=True)
    ]


def norm_difference(mine: Sequence[float], other: Sequence[float]) -> float:
    """Returns the largest relative difference over the steps; infinity if a norm is NaN or infinite."""
    differences = [abs(m - o) / abs(o) if o else abs(m) for m, o in zip(mine, other, strict=True)]
    return max(d if math.isfinite(d) else math.inf for d in differences)


def _sent_per_step(ranks: Sequence[Record]) -> float | None:
    sent = [rank["sent_bytes"] / len(rank["steps"]) for rank in ranks if rank["sent_bytes"] is not None]
    return max(sent) if len(sent) == len(ranks) else None


_COLUMNS: Mapping[str, Callable[[ArmResult], str]] = {
    "padding": lambda r: f"{r.padding_share.median:.1%}",
    "waiting": lambda r: f"{r.waiting_share.median:.1%}",
    "CPU s": lambda r: f"{r.cpu_s.median:.1f}",
    "peak memory": lambda r: f"{r.peak_bytes / 2**20:,.0f} MiB",
    "norm difference": lambda r: "-" if r.norm_difference is None else f"{r.norm_difference:.1e}",
    "samples": lambda r: {True: "same", False: "other", None: "-"}[r.has_same_samples],
    "MB sent/step": lambda r: "-" if r.sent_bytes_per_step is None else f"{r.sent_bytes_per_step / 1e6:.2f}",
}
_LEGEND = (
    "tokens/s: tokens without padding, of all ranks. Medians of the rounds with (smallest-largest);",
    "ratios are computed within each round.",
    "padding: fraction of the computed tokens. waiting: fraction of the ranks' time spent waiting for the slowest one.",
    "CPU s: CPU time of the slowest rank of each step, summed: less affected by other programs than tokens/s.",
    "peak memory: of one rank.",
    f"norm difference: relative difference of the gradient norm from {REFERENCE}, the largest of all steps.",
    f"samples: whether each step has the same samples as in {REFERENCE}.",
    "MB sent/step: of the rank that sends most, for the usual algorithms of collectives, including the first broadcast",
    "of the weights; - if it is not counted, as under torchrun.",
)


def show_results(screen: Screen, lines: Sequence[str], results: Sequence[ArmResult]) -> None:
    """Prints the conditions, the table and its legend."""
    for line in lines:
        screen.line(line)
    rows = [result_row(result) for result in results]
    screen.line()
    screen.table(list(rows[0]), [list(row.values()) for row in rows], num_left=1)
    screen.line()
    for line in (*_LEGEND, *bars(results)):
        screen.line(line)


def bars(results: Sequence[ArmResult]) -> list[str]:
    """Returns a bar chart of the ratios of the medians; [] without a baseline."""
    base = next((name for name in reversed(BASELINES) if all(name in r.times for r in results)), None)
    if base is None or len(results) < 2:
        return []
    most = max(r.times[base].median for r in results)
    width = max(len(r.name) for r in results)
    drawn = [(r.name, r.times[base].median) for r in results]
    rows = [f"{name:<{width}}  {'#' * round(_BAR_WIDTH * times / most)} {times:.2f}" for name, times in drawn]
    return ["", f"times as fast as {base}:", *rows]


def result_row(r: ArmResult) -> dict[str, str]:
    """Returns the cells of an arm's row by column."""
    return {
        "arm": r.name,
        "tokens/s": spread_text(r.tokens_per_s, "{:,.0f}".format),
        **{f"x {name}": spread_text(r.times[name], "{:.2f}".format) for name in BASELINES if name in r.times},
        **{name: cell(r) for name, cell in _COLUMNS.items()},
    }


def spread_text(spread: Spread, number: Callable[[float], str]) -> str:
    """Formats "median (smallest-largest)", or the median alone if both look the same."""
    median, low, high = (number(value) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low}-{high})"


def conditions(options: BenchOptions, device: str) -> list[str]:
    """Describes machine, versions, options and samples, one per line."""
    given = {name: value for name, value in asdict(options).items() if name not in _NOT_SHOWN}
    notes = [f"{name}: {ARMS[name].note}" for name in options.arms.split(",") if ARMS[name].note]
    # Options in variables affect the arms that call enable_multi_gpu().
    mine = " ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(ENV_PREFIX))
    return [
        f"CPU: {_cpu_name()}, {len(os.sched_getaffinity(0))} cores; 1 thread in every rank of every arm",
        f"versions: Python {platform.python_version()}, "
        + ", ".join(f"{name} {installed_version(name)}" for name in _LIBRARIES),
        f"device: {device}{', shared by all ranks over gloo' if options.is_gpu_shared else ''}",
        f"options: {', '.join(f'{name}={value}' for name, value in given.items())}",
        f"samples: mean {sum(map(len, options.rows())) / options.num_rows:.0f} tokens, "
        f"{options.num_samples_per_step} in each step; scripts for one GPU accumulate "
        f"{options.accumulation * options.ranks}",
        *notes,
        *([f"variables: {mine}"] if mine else []),
    ]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
