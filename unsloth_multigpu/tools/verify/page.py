"""The receipt of `unsloth-multigpu verify` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.report import NO_WAITING
from unsloth_multigpu.tools.verify.speed import COLUMNS, Speed, speed_rows, speed_verdict

if TYPE_CHECKING:
    from unsloth_multigpu.tools.verify.comparison import Comparison, StepDifference, WeightDifference

COMPARED = "Compared: the beginning of the script's first train(). What comes after it was not run."


def show(
    screen: Screen,
    comparison: Comparison,
    sources: Sequence[Mapping[str, str]],
    facts: Mapping[str, Any],
    num_ranks: int,
    speeds: tuple[Speed, Speed] | None = None,
    num_threads: str | None = None,
) -> None:
    """A line for each step, the weights, what may differ without a fault, what both runs took, and the verdict.

    Args:
        screen: Where to.
        comparison: What was found.
        sources: Reasons for legitimate differences: name, found, advice.
        facts: Of the run on several ranks, see `tools.verify.recorder`.
        num_ranks: Its ranks.
        speeds: Of one process and of the ranks; None where they were not measured.
        num_threads: Of the CPU, in each process; None where a GPU computes.
    """
    bounds = comparison.bounds
    ranks = f"{num_ranks} ranks"
    screen.line(f"{facts['trainer']}, {facts['precision']}, {facts['optimizer']}, {facts['device']}")
    screen.line(COMPARED)
    screen.line()
    figures = ("1 process", ranks, "difference")
    columns = ("step", "samples", f"loss, {figures[0]}", *figures[1:], f"gradient norm, {figures[0]}", *figures[1:])
    bound = ("bound", "", "", "", f"{bounds.loss:.0e}", "", "", f"{bounds.grad_norm:.0e}")
    screen.table(columns, [*(_step_cells(step, comparison) for step in comparison.steps), bound], num_left=2)
    screen.line()
    screen.line(_weights_line(comparison.weights, bounds.weights))
    if sources:
        screen.line()
        screen.line("May differ without a fault:")
        for s in sources:
            screen.line(f"  {s['name']}: {s['found']}. For agreement: {s['advice']}.")
    if speeds is not None:
        screen.line()
        screen.table((*COLUMNS, ranks), speed_rows(*speeds), num_left=1)
        if speeds[1].waiting is None:
            screen.line(f"{NO_WAITING}.")
        if num_threads is not None:
            screen.line(f"CPU threads of each process: {num_threads}.")
        screen.line()
        for line in speed_verdict(*speeds, num_ranks):
            screen.line(line)
    screen.line()
    for line in _verdict(comparison, ranks, bool(sources)):
        screen.line(line, "bold green" if comparison.agree else "bold red")


def _step_cells(step: StepDifference, comparison: Comparison) -> tuple[str, ...]:
    samples = f"{step.num_samples[0]} same" if step.has_same_samples else "OTHER"
    loss = _figures(step.loss, step.loss_difference, comparison.bounds.loss)
    grad_norm = _figures(step.grad_norm, step.grad_norm_difference, comparison.bounds.grad_norm)
    return str(step.step), samples, *loss, *grad_norm


def _figures(values: tuple[float | None, float | None], difference: float, bound: float) -> tuple[str, str, str]:
    """Both runs' values and their difference, which is marked where it is above the bound."""
    one, many = ("-" if value is None else format(value, ".6g") for value in values)
    mark = "" if difference <= bound else "!"
    return one, many, mark + format(difference, ".1e")


def _weights_line(weights: Sequence[WeightDifference], bound: float) -> str:
    counted = [weight for weight in weights if weight.counts]
    left_out = len(weights) - len(counted)
    text = f"updates of weights: {len(counted)} trained tensors"
    if counted:
        text += f", largest difference {counted[0].relative:.1e} in {counted[0].name} (bound {bound:.0e})"
    return text + (f"; {left_out} that next to nothing moved were left out" if left_out else "")


def _verdict(comparison: Comparison, ranks: str, has_sources: bool) -> list[str]:
    if comparison.agree:
        return [f"One process and {ranks} agree over {len(comparison.steps)} steps."]
    first, *others = comparison.reasons
    verdict = "WERE NOT SHOWN TO AGREE" if comparison.compared_nothing else "DO NOT AGREE"
    lines = [f"ONE PROCESS AND {ranks.upper()} {verdict}: {first}"]
    lines += [f"  {reason}" for reason in others]
    if comparison.compared_nothing:
        return lines
    if has_sources:
        lines.append("Remove what may differ without a fault, see above, and verify again.")
    elif any("other samples" in reason for reason in comparison.reasons):
        lines.append("Give shuffles, splits and generators of your own a seed; let data not depend on the rank.")
    else:
        lines.append("Look for code of the script that depends on the rank or on the rows of a micro-batch.")
    return lines
