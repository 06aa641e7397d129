"""The result of a benchmark as rows of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.tools.bench.arm import BASELINES, REFERENCE, UNGUARDED, find_arm
from unsloth_multigpu.tools.bench.option import LEARNING_RATE, UNSLOTH, BenchOptions
from unsloth_multigpu.tools.bench.result import ArmResult, Learned, Spread


@dataclass(frozen=True)
class Table:
    """Cells as text, `rows[arm][column]`, and lines that explain the columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[str]


_EXACTNESS: Mapping[str, Callable[[ArmResult], str]] = {
    "samples": lambda r: {True: "same", False: "other", None: "-"}[r.has_same_samples],
    "norm difference": lambda r: norm_text(r),
}
_LOSSES: Mapping[str, Callable[[ArmResult], str]] = {
    "padding": lambda r: f"{r.padding_share.median:.1%}",
    "waiting": lambda r: f"{r.waiting_share.median:.1%}",
}
_COSTS: Mapping[str, Callable[[ArmResult], str]] = {
    "CPU s": lambda r: f"{r.cpu_s.median:.1f}",
    "peak memory": lambda r: memory_text(r),
}
_LEARNED: Mapping[str, Callable[[Learned], str]] = {
    "s/epoch": lambda it: spread_text(it.epoch_s, "{:.1f}".format),
    "test loss": lambda it: spread_text(it.epochs[-1]["test_loss"], "{:.3f}".format),
    "accuracy": lambda it: spread_text(it.epochs[-1]["accuracy"], "{:.1%}".format),
    "MB sent/step": lambda it: "-" if it.sent_bytes_per_step is None else f"{it.sent_bytes_per_step / 1e6:.2f}",
    "updates": lambda it: str(it.num_updates),
}
_LEGEND = (
    "tokens/s: tokens that are no padding, of all ranks. Medians of the rounds with (smallest-largest);",
    "the ratios are taken within each round.",
    f"samples: whether each step has the samples that {REFERENCE} has there.",
    f"norm difference: of the gradient from {REFERENCE}, relative, the largest of all steps.",
    "padding: part of the computed tokens. waiting: part of the ranks' time for the slowest one.",
    "CPU s: CPU time of the slowest rank of each step, summed: what counts where other programs disturb.",
    "peak memory: of one rank. largest batch: rows x longest row of a micro-batch, in tokens.",
)
_LEARNED_LEGEND = (
    "test loss, accuracy: at the end, of the next byte in texts that were not learned. s/epoch: without its test.",
    "norm difference: of the first epoch's steps; - where a step has no gradient of all ranks.",
    "MB sent/step: of the rank that sends most, in the algorithms that are usual, the first broadcast of the",
    "weights included. updates: optimizer steps that the weights have seen, one after the other.",
)
_EPOCH_LEGEND = ("train loss: mean over the steps of the epoch. The rest is measured at its end.",)


def result_tables(results: Sequence[ArmResult]) -> list[Table]:
    """One row per arm; of strategies also what they have learned after each epoch."""
    if results[0].learned is None:
        shown = {**_EXACTNESS, **_LOSSES, **_COSTS, "largest batch": lambda r: f"{r.largest_tokens:,}"}
        return [_table("arm", results, shown, _LEGEND)]
    learned = {name: lambda r, cell=cell: cell(r.learned) for name, cell in _LEARNED.items()}
    shown = {**learned, **_EXACTNESS, **_COSTS}
    return [_table("strategy", results, shown, (*_LEGEND, *_LEARNED_LEGEND)), _epoch_table(results)]


def _table(
    what: str, results: Sequence[ArmResult], shown: Mapping[str, Callable[[ArmResult], str]], legend: Sequence[str]
) -> Table:
    others = [name for name in BASELINES if name in results[0].times]
    rows = [
        [
            r.name,
            spread_text(r.tokens_per_s, "{:,.0f}".format),
            *(spread_text(r.times[name], ("{:.3f}" if name == UNGUARDED else "{:.2f}").format) for name in others),
            *(cell(r) for cell in shown.values()),
        ]
        for r in results
    ]
    return Table([what, "tokens/s", *(f"x {name}" for name in others), *shown], rows, legend)


def _epoch_table(results: Sequence[ArmResult]) -> Table:
    formats = {"train loss": "{:.3f}", "test loss": "{:.3f}", "accuracy": "{:.1%}"}
    learned = {r.name: r.learned.epochs for r in results if r.learned is not None}
    numbers = range(1, 1 + len(next(iter(learned.values()))))
    rows = [
        [name, *(spread_text(e[what.replace(" ", "_")], f.format) for e in epochs for what, f in formats.items())]
        for name, epochs in learned.items()
    ]
    return Table(["strategy", *(f"{what} {n}" for n in numbers for what in formats)], rows, _EPOCH_LEGEND)


def memory_text(result: ArmResult) -> str:
    """The most memory of one rank."""
    reserved = "" if result.reserved_bytes is None else f" ({result.reserved_bytes / 2**20:,.0f} reserved)"
    return f"{result.peak_bytes / 2**20:,.0f} MiB{reserved}"


def norm_text(result: ArmResult) -> str:
    """The largest difference of a gradient norm."""
    return "-" if result.norm_difference is None else f"{result.norm_difference:.1e}"


def spread_text(spread: Spread | None, number: Callable[[float], str]) -> str:
    """Median (smallest-largest), without what cannot be told apart."""
    if spread is None:
        return "-"
    median, low, high = (number(value) for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low}-{high})"


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
    is_shared = ", shared by all ranks over gloo" if options.is_card_shared else ""
    steps = f"{options.steps} timed after {options.warmup} of warm-up"
    if options.is_learning:
        steps = f"{options.epochs} epochs of {options.steps}, timed but for the first {options.warmup}"
    lines = [
        f"device: {devices}{is_shared}",
        model_text(options) + _library_text(options),
        f"samples: {options.lengths}, mean {num_tokens / options.num_rows:.0f} tokens, "
        f"{options.num_samples_per_step} in each step{', rows end to end' if options.padding_free else ''}",
        f"batch: {options.batch_size} per device, accumulation {options.accumulation}, {options.ranks} ranks; "
        f"scripts for one GPU accumulate {options.accumulation * options.ranks}",
        f"steps: {steps}; {options.repeats} round(s), seed {options.seed}",
        f"threads: {num_threads} in every rank of every arm (OMP_NUM_THREADS=1)",
    ]
    said = {
        "turns: all arms of a round are in memory at once, and one trains at a time, a step; launchers that watch "
        "waiting ranks continue": options.interleave == "steps",
        f"training: AdamW, constant learning rate {LEARNING_RATE:g}; all strategies deal samples in order "
        '(balance="off"), so that they differ in nothing but how gradients meet': options.is_learning,
        f"checkpoints: every {options.save_steps} steps; their time is that of the step after them": options.save_steps,
        f"slow rank: {options.slow_rank.replace(':', ' computes at ')} of its speed, simulated by sleeping, which "
        "takes no CPU time; arms of one process are not slowed": options.slow_rank,
    }
    notes = [f"{name}: {find_arm(name).note}" for name in options.arms if find_arm(name).note]
    return lines + [line for line, holds in said.items() if holds] + notes


def model_text(options: BenchOptions) -> str:
    """The model, as one of the conditions."""
    return (
        f"model: Llama, hidden {options.hidden_size}, {options.num_layers} layers, vocabulary {options.vocab_size:,}, "
        f"random weights, {options.dtype}, {options.train} training"
    )


def _library_text(options: BenchOptions) -> str:
    parts = ["gradient checkpointing"] if options.gradient_checkpointing else []
    parts += ["FastLanguageModel and SFTTrainer of Unsloth"] if options.library == UNSLOTH else []
    parts += ["4-bit weights"] if options.four_bit else []
    parts += [options.optim] if options.optim != BenchOptions.optim else []
    return "".join(f", {part}" for part in parts)
