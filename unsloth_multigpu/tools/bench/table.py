"""The result of a benchmark as rows of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.tools.bench.arm import BASELINE, REFERENCE, UNGUARDED
from unsloth_multigpu.tools.bench.option import DEFAULT_OPTIMIZER, LEARNING_RATE, UNSLOTH, BenchOptions
from unsloth_multigpu.tools.bench.result import ArmResult, Spread
from unsloth_multigpu.tools.bench.strategy_arm import find_arm


@dataclass(frozen=True)
class Table:
    """Cells as text, `rows[arm][column]`, and lines that explain the columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[str]


COLUMNS = (
    "arm",
    "tokens/s",
    f"x {BASELINE}",
    f"x {REFERENCE}",
    "samples",
    "norm difference",
    "padding",
    "waiting",
    "CPU s",
    "peak memory",
    "largest batch",
)
_UNGUARDED_COLUMN = COLUMNS.index("samples")
LEGEND = (
    "tokens/s: tokens that are no padding, of all ranks. Medians of the rounds with (smallest-largest);",
    "the ratios are taken within each round.",
    f"samples: whether each step has the samples that {REFERENCE} has there.",
    f"norm difference: of the gradient from {REFERENCE}, relative, the largest of all steps.",
    "padding: part of the computed tokens. waiting: part of the ranks' time for the slowest one.",
    "CPU s: CPU time of the slowest rank of each step, summed: what counts where other programs disturb.",
    "peak memory: of one rank. largest batch: rows x longest row of a micro-batch, in tokens.",
)


def result_table(results: Sequence[ArmResult]) -> Table:
    """One row per arm; a column more where what guarding costs was measured."""
    rows = [
        [
            r.name,
            spread_text(r.tokens_per_s, "{:,.0f}".format),
            spread_text(r.times_baseline, "{:.2f}".format),
            spread_text(r.times_reference, "{:.2f}".format),
            {True: "same", False: "other", None: "-"}[r.has_same_samples],
            norm_text(r),
            f"{r.padding_share.median:.1%}",
            f"{r.waiting_share.median:.1%}",
            f"{r.cpu_s.median:.1f}",
            memory_text(r),
            f"{r.largest_tokens:,}",
        ]
        for r in results
    ]
    if all(r.times_unguarded is None for r in results):
        return Table(COLUMNS, rows, LEGEND)
    for row, result in zip(rows, results, strict=True):
        row.insert(_UNGUARDED_COLUMN, spread_text(result.times_unguarded, "{:.3f}".format))
    columns = [*COLUMNS[:_UNGUARDED_COLUMN], f"x {UNGUARDED}", *COLUMNS[_UNGUARDED_COLUMN:]]
    return Table(columns, rows, LEGEND)


def memory_text(result: ArmResult) -> str:
    """The most memory of one rank."""
    reserved = "" if result.reserved_bytes is None else f" ({result.reserved_bytes / 2**20:,.0f} reserved)"
    return f"{result.peak_bytes / 2**20:,.0f} MiB{reserved}"


def norm_text(result: ArmResult) -> str:
    """The largest difference of a gradient norm."""
    return "-" if result.norm_difference is None else f"{result.norm_difference:.1e}"


def show_result(lines: Sequence[str], tables: Sequence[Table]) -> None:
    """Prints the conditions and the tables with what explains their columns."""
    screen = Screen()
    for line in lines:
        screen.line(line)
    for table in tables:
        screen.line()
        screen.table(table.columns, table.rows, num_left=1)
        screen.line()
        for line in table.legend:
            screen.line(line)


def conditions(options: BenchOptions, num_tokens: int, devices: str, num_threads: str) -> list[str]:
    """What was measured, in lines.

    Args:
        num_tokens: Of all rows, without padding.
        devices: What the ranks computed on.
        num_threads: How many threads each rank's torch had, all that occurred.
    """
    is_shared = "; the ranks share it over gloo, ours started by torchrun" if options.is_card_shared else ""
    steps = f"{options.num_steps} timed after {options.num_warmup} of warm-up"
    if options.num_epochs is not None:
        steps = f"{options.num_epochs} epochs of {options.num_steps}, timed but for the first {options.num_warmup}"
    lines = [
        f"device: {devices}{is_shared}",
        f"model: Llama, hidden {options.hidden_size}, {options.num_layers} layers, vocabulary {options.vocab_size:,}, "
        f"random weights, {options.dtype}, {options.train} training"
        f"{', gradient checkpointing' if options.has_checkpointing else ''}{_library_text(options)}",
        f"samples: {options.lengths}, mean {num_tokens / options.num_rows:.0f} tokens, "
        f"{options.num_samples_per_step} in each step{', rows end to end' if options.is_padding_free else ''}",
        f"batch: {options.batch_size} per device, accumulation {options.accumulation}, {options.num_ranks} ranks; "
        f"scripts for one GPU accumulate {options.accumulation * options.num_ranks}",
        f"steps: {steps}; {options.num_repeats} round(s), seed {options.seed}",
        f"threads: {num_threads} in every rank of every arm (OMP_NUM_THREADS=1)",
    ]
    if options.interleave == "steps":
        lines.append(
            "turns: all arms of a round are in memory at once, and one trains at a time, a step; launchers that watch "
            "waiting ranks continue"
        )
    if options.num_epochs is not None:
        lines.append(
            f"training: AdamW, constant learning rate {LEARNING_RATE:g}; all strategies deal samples in order "
            '(balance="off"), so that they differ in nothing but how gradients meet'
        )
    if options.save_steps is not None:
        lines.append(f"checkpoints: every {options.save_steps} steps; their time is that of the step after them")
    if options.slow_rank is not None:
        lines.append(
            f"slow rank: {options.slow_rank} computes at {options.slow_speed:g} of its speed, "
            "simulated by sleeping, which takes no CPU time; arms of one process are not slowed"
        )
    notes = [f"{name}: {find_arm(name).note}" for name in options.arms if find_arm(name).note]
    return lines + notes


def _library_text(options: BenchOptions) -> str:
    parts = ["FastLanguageModel and SFTTrainer of Unsloth"] if options.library == UNSLOTH else []
    parts += ["4-bit weights"] if options.is_four_bit else []
    parts += [options.optimizer] if options.optimizer != DEFAULT_OPTIMIZER else []
    return "".join(f", {part}" for part in parts)


def spread_text(spread: Spread | None, number: Callable[[float], str]) -> str:
    """Median (smallest-largest), without what cannot be told apart."""
    if spread is None:
        return "-"
    median, low, high = (number(value) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low}-{high})"
