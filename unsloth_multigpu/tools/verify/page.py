"""The receipt of `unsloth-multigpu verify` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.step.comparison import times_in_words

if TYPE_CHECKING:
    from unsloth_multigpu.tools.verify.comparison import Agreement, Bounds, StepDifference, WeightDifference

COMPARED = "Compared: the beginning of the script's first train(). What comes after it was not run."


def show(
    screen: Screen,
    found: Agreement,
    sources: Sequence[Mapping[str, str]],
    facts: Mapping[str, Any],
    num_ranks: int,
    num_threads: str | None = None,
) -> None:
    """A line for each step, the weights, what may differ without a fault, how much sooner it is, and the verdict.

    Args:
        screen: Where to.
        found: What was found.
        sources: Reasons for legitimate differences: name, found, advice.
        facts: Of the run on several ranks, see `tools.verify.recorder`.
        num_ranks: Its ranks.
        num_threads: Of the CPU, in each process; None where a GPU computes.
    """
    ranks = f"{num_ranks} ranks"
    screen.line(f"{facts['trainer']}, {facts['optimizer']}, {facts['device']}")
    screen.line(COMPARED)
    screen.line()
    figures = ("1 process", ranks, "difference")
    columns = ("step", "samples", f"loss, {figures[0]}", *figures[1:], f"gradient norm, {figures[0]}", *figures[1:])
    loss, grad_norm, rounding = (f"{b:.0e}" for b in (found.bounds.loss, found.bounds.grad_norm, facts["rounding"]))
    bounds = ("bound", "", "", "", loss, "", "", grad_norm, rounding)
    rows = [*(_step_cells(step, found.bounds) for step in found.steps), bounds]
    screen.table((*columns, "from the same weights"), rows, num_left=2)
    screen.line()
    screen.line(_weights_line(found.weights, found.bounds.weights))
    for why in dict.fromkeys(s.compared["not_compared"] for s in found.steps if s.compared and not s.is_compared):
        screen.line(f"gradients from the same weights were not compared: {why}")
    if sources:
        screen.line()
        screen.line("May differ without a fault:")
        for s in sources:
            screen.line(f"  {s['name']}: {s['found']}. For agreement: {s['advice']}.")
    if found.times is not None:
        screen.line()
        threads = "" if num_threads is None else f"; CPU threads of each process: {num_threads}"
        screen.line(f"median step without its update: {times_in_words(*found.times, num_ranks)}{threads}")
    screen.line()
    for line in _verdict(found, ranks, bool(sources)):
        screen.line(line, "bold green" if found.agree else "bold red")


def _step_cells(step: StepDifference, bounds: Bounds) -> tuple[str, ...]:
    samples = f"{step.num_samples[0]} same" if step.has_same_samples else "OTHER"
    loss = _figures(step.loss, step.loss_difference, bounds.loss)
    grad_norm = _figures(step.grad_norm, step.grad_norm_difference, bounds.grad_norm)
    same = "-"
    if step.is_compared:
        off = step.compared["difference"]
        same = ("" if step.compared["is_exact"] else "!") + ("inf" if off is None else f"{off:.1e}")
    return str(step.step), samples, *loss, *grad_norm, same


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


def _verdict(found: Agreement, ranks: str, has_sources: bool) -> list[str]:
    if found.agree:
        return [f"One process and {ranks} agree over {len(found.steps)} steps."]
    first, *others = found.reasons
    verdict = "WERE NOT SHOWN TO AGREE" if found.compared_nothing else "DO NOT AGREE"
    lines = [f"ONE PROCESS AND {ranks.upper()} {verdict}: {first}", *(f"  {reason}" for reason in others)]
    if found.compared_nothing:
        return lines
    if has_sources:
        return [*lines, "Remove what may differ without a fault, see above, and verify again."]
    if any("other samples" in reason for reason in found.reasons):
        return [*lines, "Give shuffles, splits and generators of your own a seed; let data not depend on the rank."]
    return [*lines, "Look for code of the script that depends on the rank or on the rows of a micro-batch."]
