"""The forecast as a table."""

from __future__ import annotations

from collections.abc import Sequence

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.step.comparison import times_in_words
from unsloth_multigpu.step.forecast import TimeForecast, Workload
from unsloth_multigpu.step.link import Network
from unsloth_multigpu.tools.forecast.measured import Check, Measured
from unsloth_multigpu.words import duration

_COLUMNS = (
    "GPUs",
    "step",
    "training",
    "speed-up",
    "efficiency",
    "computing",
    "waiting",
    "link",
    "update",
    "padding",
)
_LEGEND = (
    "speed-up: over the script in one process, with its own micro-batches; efficiency: for each GPU, over one GPU that "
    "plans its micro-batches. The shares are of the GPUs' time; update = the optimizer, loading and logging; padding: "
    "of the computed tokens."
)


def show(
    screen: Screen,
    measured: Measured,
    numbers: Sequence[int],
    rows: Sequence[TimeForecast],
    network: Network,
    advice: Sequence[str],
    checked: Check | None,
) -> None:
    """What was measured on several ranks, the table, what it is made from, and what to do.

    Args:
        screen: Where to.
        measured: Of one rank.
        numbers: Of GPUs that were asked for.
        rows: A forecast for each that has samples, and for one.
        network: What joins them.
        advice: See `advice.advise`.
        checked: Forecast and reality, where several ranks were run.
    """
    for line in [*facts(measured, rows, network, checked), ""]:
        screen.line(line)
    screen.table(_COLUMNS, table_rows(measured.work, numbers, rows), num_left=0)
    screen.line(f"\n{_LEGEND}\n")
    head, *rest = advice
    screen.line(head, "bold")
    for line in rest:
        screen.line(line)


def facts(measured: Measured, rows: Sequence[TimeForecast], network: Network, checked: Check | None) -> list[str]:
    """What was measured, and what was assumed."""
    work, found = measured.work, measured.facts
    is_by_length = work.is_planned and work.exchange != "now and then"
    dealt = "dealt by length" if is_by_length else "dealt in order"
    lengths = [n for step in work.steps for n in step]
    span = f" ({min(lengths)} to {max(lengths)} tokens)" if found["is_length_known"] else ""
    samples = f"{work.num_samples} samples in a step, {dealt}{span}"
    if not work.keeps_batch:
        samples = f"{work.num_samples} samples in a step of each GPU (global_batch='scale')"
    how = "sharded" if measured.mode == "sharded" else f"strategy={found['asked']['strategy']}"
    overhead = work.timing.overhead_tokens
    lines = []
    if checked is not None and (first := checked.first_step) and first["one_process_s"] and first["dealt_s"]:
        times = times_in_words(first["one_process_s"], first["dealt_s"], checked.num_ranks)
        lines = [f"measured, forward and backward passes of the first step: {times}"]
    lines += [
        f"{found['model']}, {found['num_parameters']:,} parameters, {found['num_trained']:,} trained; "
        f"{found['trainer']}, {samples}; {how}",
        f"measured on one rank ({found['device']}), {len(found['steps'])} steps: {_short(work.token_s)} a token, "
        f"{overhead:.0f} tokens more for each micro-batch, {_short(work.update_s)} of a step for the update; the "
        f"fitted costs repeat these steps within {measured.misfit:.1%}",
        f"link: {network.describe(max(row.num_ranks for row in rows))}",
    ]
    if work.epochs is not None and (again := [r.num_ranks for r in rows if r.num_ranks > work.epochs.num_batches]):
        lines.append(
            f"note: an epoch has {work.epochs.num_batches:,} micro-batches: "
            f"{', '.join(f'{n:,}' for n in again)} GPUs are given samples again in each"
        )
    if checked is not None:
        lines.append(
            f"check on {checked.num_ranks} ranks: forecast {_short(checked.forecast_s)} a step, measured "
            f"{_short(checked.measured_s)}; forecast / measured {checked.ratio:.2f}"
        )
    return [*lines, *(f"note: {note}" for note in measured.notes)]


def table_rows(work: Workload, numbers: Sequence[int], rows: Sequence[TimeForecast]) -> list[tuple[str, ...]]:
    """One for each number of GPUs; those with too few samples say so."""
    found = {row.num_ranks: row for row in rows}
    has = f"{work.most_ranks:,} {'samples' if work.keeps_batch else 'batches'}"
    return [_cells(found[n]) if n in found else (f"{n:,}", "refused", has, *[""] * 7) for n in sorted({1, *numbers})]


def _cells(row: TimeForecast) -> tuple[str, ...]:
    shares = (row.computing, row.waiting, row.link, row.update, row.padding)
    return (
        f"{row.num_ranks:,}",
        _short(row.step_s),
        duration(row.total_s),
        f"{row.speed_up:.2f}x",
        f"{row.efficiency:.0%}",
        *(f"{share:.1%}" for share in shares),
    )


def _short(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds / 1e-9:.3g} ns"
