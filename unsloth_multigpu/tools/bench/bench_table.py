"""Prints the result of a benchmark as a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.tools.bench.arm import ARMS, BASELINES, REFERENCE
from unsloth_multigpu.tools.bench.bench_option import BenchOptions
from unsloth_multigpu.tools.bench.bench_result import ArmResult, Spread
from unsloth_multigpu.versions import installed_version

_LIBRARIES = ("unsloth-multigpu", "torch", "transformers", "accelerate", "peft", "datasets")
_NOT_SHOWN = ("arms", "device", "json", "timeout_s", "model_folder", "is_card_shared")
_BAR_WIDTH = 60
# Cells as text, by the names of the columns.
Row = dict[str, str]
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


def result_row(r: ArmResult) -> Row:
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
        f"device: {device}{', shared by all ranks over gloo' if options.is_card_shared else ''}",
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
