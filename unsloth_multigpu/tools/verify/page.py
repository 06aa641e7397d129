"""Prints the receipt of `unsloth-multigpu verify` as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.step.comparison import times_in_words
from unsloth_multigpu.tools.verify.run_comparison import compared_nothing, is_compared


def show(screen: Screen, receipt: Mapping[str, Any], num_threads: str | None = None) -> None:
    """Prints a line per step, the weights, legitimate differences, the speed-up and the verdict.

    Args:
        screen: The output.
        receipt: The result of the comparison.
        num_threads: CPU threads of each process; None on a GPU.
    """
    facts, bounds, steps = receipt["runs"]["many"], receipt["bounds"], receipt["steps"]
    ranks = f"{facts['world_size']} ranks"
    screen.line(f"{facts['trainer']}, {facts['optimizer']}, {facts['device']}")
    screen.line(receipt["compared"])
    screen.line()
    figures = ("1 process", ranks, "difference")
    columns = ("step", "samples", f"loss, {figures[0]}", *figures[1:], f"gradient norm, {figures[0]}", *figures[1:])
    loss, grad_norm, rounding = (f"{b:.0e}" for b in (bounds["loss"], bounds["grad_norm"], facts["rounding"]))
    rows = [*(tuple(_cells(step, bounds)) for step in steps), ("bound", "", "", "", loss, "", "", grad_norm, rounding)]
    screen.table((*columns, "from the same weights"), rows, num_left=2)
    screen.line()
    screen.line(_weights_line(receipt["weights"], bounds["weights"]))
    for why in dict.fromkeys(s["compared"]["not_compared"] for s in steps if s["compared"] and not is_compared(s)):
        screen.line(f"gradients from the same weights were not compared: {why}")
    if receipt["sources"]:
        screen.line()
        screen.line("Legitimate differences:")
        for s in receipt["sources"]:
            screen.line(f"  {s['name']}: {s['found']}. To avoid it: {s['advice']}.")
    if receipt["one_process_s"] is not None:
        screen.line()
        threads = "" if num_threads is None else f"; CPU threads of each process: {num_threads}"
        times = times_in_words(receipt["one_process_s"], receipt["ranks_s"], facts["world_size"])
        screen.line(f"median step without its update: {times}{threads}")
    screen.line()
    for line in _verdict(receipt, ranks):
        screen.line(line, "bold green" if receipt["agree"] else "bold red")


def _cells(step: Mapping[str, Any], bounds: Mapping[str, float]) -> Iterator[str]:
    """Yields both runs' values and their difference, marked with "!" above the bound."""
    yield str(step["step"])
    yield f"{step['num_samples'][0]} same" if step["has_same_samples"] else "OTHER"
    for name in ("loss", "grad_norm"):
        by = step[f"{name}_difference"]
        yield from ("-" if value is None else format(value, ".6g") for value in step[name])
        yield ("" if by <= bounds[name] else "!") + format(by, ".1e")
    off = step["compared"].get("difference")
    mark = "" if step["compared"].get("is_exact") else "!"
    yield mark + ("inf" if off is None else f"{off:.1e}") if is_compared(step) else "-"


def _weights_line(weights: Sequence[Mapping[str, Any]], bound: float) -> str:
    counted = [weight for weight in weights if weight["counts"]]
    left_out = len(weights) - len(counted)
    text = f"updates of weights: {len(counted)} trained tensors"
    if counted:
        text += f", largest difference {counted[0]['relative']:.1e} in {counted[0]['name']} (bound {bound:.0e})"
    return text + (f"; {left_out} tensors with almost no change were left out" if left_out else "")


def _verdict(receipt: Mapping[str, Any], ranks: str) -> Iterator[str]:
    if receipt["agree"]:
        yield f"One process and {ranks} agree over {len(receipt['steps'])} steps."
        return
    has_nothing = compared_nothing(receipt)
    first, *others = receipt["reasons"]
    yield (f"ONE PROCESS AND {ranks.upper()} {'WERE NOT SHOWN TO AGREE' if has_nothing else 'DO NOT AGREE'}: {first}")
    yield from (f"  {reason}" for reason in others)
    if has_nothing:
        return
    if receipt["sources"]:
        yield "Remove the legitimate differences, see above, and verify again."
    elif any("other samples" in reason for reason in receipt["reasons"]):
        yield "Seed shuffles, splits and generators in the script; the data must not depend on the rank."
    else:
        yield "Look for code in the script that depends on the rank or on the rows of a micro-batch."
