"""The first sentences of a benchmark's page: what was measured, and what came out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from unsloth_multigpu.tools.bench.arm import BASELINE, REFERENCE
from unsloth_multigpu.tools.bench.option import BenchOptions
from unsloth_multigpu.tools.bench.result import ArmResult, Spread
from unsloth_multigpu.tools.bench.strategy_result import StrategyResult

_LINE = "ours"
# A norm of the gradient that is one process's: bounds of `unsloth-multigpu verify`, by arithmetic.
NORM_BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
# Half of the distance between 1 and the next number.
ROUNDINGS = {"fp32": 2.0**-24, "bf16": 2.0**-9}


def headline(results: Sequence[ArmResult], learned: Sequence[StrategyResult], options: BenchOptions) -> list[str]:
    """Sentences: what was measured, and the result.

    Args:
        learned: Of each strategy; empty where arms were compared.
    """
    device = "GPU" if options.device == "cuda" else "CPU"
    what = f"A Llama with random weights trained in {len(results)} ways, on {options.num_ranks} {device} ranks"
    measured = f"{what}, {options.num_steps} timed steps, {options.num_repeats} round(s)."
    if learned:
        epochs = f"{options.num_epochs} epoch(s), {options.num_repeats} round(s)."
        return [f"{what}, {epochs}", _learned(learned)]
    return [measured, _compared(results, options)]


def _compared(results: Sequence[ArmResult], options: BenchOptions) -> str:
    ours = next((r for r in results if r.name == _LINE), None)
    if ours is None:
        fastest = max(results, key=lambda r: r.tokens_per_s.median)
        return f"Most tokens in a second: {fastest.name}, {fastest.tokens_per_s.median:,.0f}."
    pairs = ((ours.times_reference, "one process"), (ours.times_baseline, BASELINE))
    times = [f"{_times(ratio)} times as fast as {name}" for ratio, name in pairs if ratio is not None]
    speed = f"{', and '.join(times)}" if times else f"{ours.tokens_per_s.median:,.0f} tokens in a second"
    return f"With the line: {speed}; {_proof(ours, options)}."


def _proof(ours: ArmResult, options: BenchOptions) -> str:
    if ours.has_same_samples is None:
        return f"without {REFERENCE} there is nothing to compare its gradients with"
    if not ours.has_same_samples:
        return f"its steps have OTHER samples than those of {REFERENCE}"
    if ours.norm_difference is None:
        return "each step has the samples of one process"
    if ours.norm_difference == 0:
        return "each step has the samples of one process, and its gradient norm to the last bit"
    bound = NORM_BOUNDS[options.dtype]
    verdict = "is rounding" if ours.norm_difference <= bound else f"is MORE than rounding (bound {bound:.0e})"
    differs = f"its gradient norm differs by {ours.norm_difference:.0e}"
    return f"each step has the samples of one process, and {differs}, which {verdict}"


def _times(ratio: Spread) -> str:
    span = "" if f"{ratio.low:.2f}" == f"{ratio.high:.2f}" else f" ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{ratio.median:.2f}{span}"


def _learned(learned: Sequence[StrategyResult]) -> str:
    """Strategies that end with one accuracy are named together."""
    groups: dict[str, list[str]] = {}
    for r in sorted(learned, key=lambda r: -r.accuracies[-1].median):
        groups.setdefault(f"{r.accuracies[-1].median:.1%}", []).append(r.name)
    parts = "; ".join(f"{accuracy}: {', '.join(names)}" for accuracy, names in groups.items())
    return f"Accuracy on unseen text at the end, {parts}."
