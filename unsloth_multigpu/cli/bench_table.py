"""The result of a benchmark as rows of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unsloth_multigpu.cli.bench_arm import ARMS, BASELINE, REFERENCE
from unsloth_multigpu.cli.bench_option import BenchOptions
from unsloth_multigpu.cli.bench_result import ArmResult, Spread

COLUMNS = (
    "arm",
    "tokens/s",
    f"x {BASELINE}",
    f"x {REFERENCE}",
    "padding",
    "waiting",
    "CPU s",
    "peak memory",
    "largest batch",
    "norm difference",
    "samples",
)
LEGEND = (
    "tokens/s: tokens that are no padding, of all ranks. Medians of the rounds with (smallest-largest);",
    "the ratios are taken within each round.",
    "padding: part of the computed tokens. waiting: part of the ranks' time for the slowest one.",
    "CPU s: CPU time of the slowest rank of each step, summed: what counts where other programs disturb.",
    "peak memory: of one rank. largest batch: rows x longest row of a micro-batch, in tokens.",
    f"norm difference: of the gradient from {REFERENCE}, relative, the largest of all steps.",
    f"samples: whether each step has the samples that {REFERENCE} has there.",
)


def table_rows(results: Sequence[ArmResult]) -> list[list[str]]:
    """One row of cells per arm, as `COLUMNS` says."""
    return [
        [
            r.name,
            _spread(r.tokens_per_s, lambda v: f"{v:,.0f}"),
            _spread(r.times_baseline, lambda v: f"{v:.2f}"),
            _spread(r.times_reference, lambda v: f"{v:.2f}"),
            f"{r.padding_share.median:.1%}",
            f"{r.waiting_share.median:.1%}",
            f"{r.cpu_s.median:.1f}",
            f"{r.peak_bytes / 2**20:,.0f} MiB",
            f"{r.largest_tokens:,}",
            "-" if r.norm_difference is None else f"{r.norm_difference:.1e}",
            {True: "same", False: "other", None: "-"}[r.has_same_samples],
        ]
        for r in results
    ]


def render_table(results: Sequence[ArmResult]) -> str:
    """The table as aligned text."""
    rows = [list(COLUMNS), *table_rows(results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    names = [row[0].ljust(widths[0]) for row in rows]
    return "\n".join("  ".join([name, *row[1:]]) for name, row in zip(names, aligned, strict=True))


def conditions(options: BenchOptions, num_tokens: int, devices: str, num_threads: str) -> list[str]:
    """What was measured, in lines.

    Args:
        num_tokens: Of all rows, without padding.
        devices: What the ranks computed on.
        num_threads: How many threads each rank's torch had, all that occurred.
    """
    is_shared = "; the ranks share it over gloo, ours started by torchrun" if options.is_card_shared else ""
    lines = [
        f"device: {devices}{is_shared}",
        f"model: Llama, hidden {options.hidden_size}, {options.num_layers} layers, vocabulary {options.vocab_size:,}, "
        f"random weights, {options.dtype}, {options.train} training",
        f"samples: {options.lengths}, mean {num_tokens / options.num_rows:.0f} tokens, "
        f"{options.num_samples_per_step} in each step",
        f"batch: {options.batch_size} per device, accumulation {options.accumulation}, {options.num_ranks} ranks; "
        f"scripts for one GPU accumulate {options.accumulation * options.num_ranks}",
        f"steps: {options.num_steps} timed after {options.num_warmup} of warm-up, {options.num_repeats} round(s), "
        f"seed {options.seed}",
        f"threads: {num_threads} in every rank of every arm (OMP_NUM_THREADS=1)",
    ]
    if options.slow_rank is not None:
        lines.append(
            f"slow rank: {options.slow_rank} computes at {options.slow_speed:g} of its speed, "
            "simulated by sleeping, which takes no CPU time; arms of one process are not slowed"
        )
    notes = [f"{name}: {ARMS[name].note}" for name in options.arms if ARMS[name].note]
    return lines + notes


def _spread(spread: Spread | None, number: Callable[[float], str]) -> str:
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)}-{number(spread.high)})"
