"""The receipt of `unsloth-multigpu verify` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsloth_multigpu.tools.verify.comparison import Comparison, StepDifference, WeightDifference

COMPARED = "Compared: the beginning of the script's first train(). What comes after it was not run."
_WIDTH = 12


def render(
    comparison: Comparison, sources: Sequence[Mapping[str, str]], facts: Mapping[str, Any], num_ranks: int
) -> str:
    """Text for a terminal: a line for each step, the weights, what may differ without a fault, and the verdict.

    Args:
        comparison: What was found.
        sources: Reasons for legitimate differences: name, found, advice.
        facts: Of the run on several ranks, see `tools.verify.recorder`.
        num_ranks: Its ranks.
    """
    bounds = comparison.bounds
    ranks = f"{num_ranks} ranks"
    titles = [f"{title:>{_WIDTH}}" for title in ("1 process", ranks, "difference")]
    lines = [
        f"{facts['trainer']}, {facts['precision']}, {facts['optimizer']}, {facts['device']}",
        COMPARED,
        "",
        f"{'':14}{'loss':>{3 * _WIDTH}}{'gradient norm':>{3 * _WIDTH + 4}}",
        f"step  samples {''.join(titles)}    {''.join(titles)}",
        *(_step_line(step, comparison) for step in comparison.steps),
        f"{'bound':<14}{'':{2 * _WIDTH}}{bounds.loss:>{_WIDTH}.0e}{'':{2 * _WIDTH + 4}}{bounds.grad_norm:>{_WIDTH}.0e}",
        "",
        _weights_line(comparison.weights, bounds.weights),
    ]
    if sources:
        lines += ["", "May differ without a fault:"]
        lines += [f"  {s['name']}: {s['found']}. For agreement: {s['advice']}." for s in sources]
    lines += ["", *_verdict(comparison, ranks, bool(sources))]
    return "\n".join(lines)


def _step_line(step: StepDifference, comparison: Comparison) -> str:
    samples = f"{step.num_samples[0]} same" if step.has_same_samples else "OTHER"
    bounds = comparison.bounds
    loss = _figures(step.loss, step.loss_difference, bounds.loss)
    grad_norm = _figures(step.grad_norm, step.grad_norm_difference, bounds.grad_norm)
    return f"{step.step:>4}  {samples:<8}{loss}    {grad_norm}".rstrip()


def _figures(values: tuple[float | None, float | None], difference: float, bound: float) -> str:
    """Both runs' values and their difference, which is marked where it is above the bound."""
    shown = "".join(f"{'-' if value is None else format(value, '.6g'):>{_WIDTH}}" for value in values)
    mark = "" if difference <= bound else "!"
    return f"{shown}{mark + format(difference, '.1e'):>{_WIDTH}}"


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
