"""The receipt of `unsloth-multigpu verify`: compares the records of a run in one process and of a run on several ranks.

A run is the result of `merged`, made from the records of `verify_recorder`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.step.comparison import FINE, difference, times_in_words

# Facts that must be equal in both runs.
_SAME_FACTS = ("device", "rounding", "optimizer", "trainer")
_NOTHING = "nothing could be compared"
_TOO_EARLY = "the first steps of fp16 overflow, and a warm-up may begin at 0: raise --steps"
Values = Mapping[str, Any]


def merged(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns rank 0's record of a run with the samples of all ranks. The first of `records` is rank 0's."""
    first = records[0]
    for step in first["steps"]:
        same_step = [s for record in records for s in record["steps"] if s["step"] == step["step"]]
        step["samples"] = sum((Counter(s["samples"]) for s in same_step), Counter[str]())
    return first


def make_receipt(program: Sequence[str], one: Values, many: Values) -> dict[str, Any]:
    """Returns the result of `compare` with the facts of both runs, legitimate differences and the median times."""
    found = compare(one, many)
    compared = [step["compared"] for step in found["steps"] if is_compared(step)]
    times = [(each["one_process_s"], each["dealt_s"]) for each in compared if each["one_process_s"] and each["dealt_s"]]
    one_s, ranks_s = (statistics.median(column) for column in zip(*times, strict=True)) if times else (None, None)
    return {
        "schema_version": 3,
        "command": list(program),
        "compared": "Compared: the beginning of the script's first train(). The rest of the script was not run.",
        "sources": list({source["name"]: source for run in (one, many) for source in run["sources"]}.values()),
        "runs": {"one": one["facts"], "many": many["facts"]},
        # Median seconds of a step's forward and backward passes.
        "one_process_s": one_s,
        "ranks_s": ranks_s,
        **found,
    }


def bounds_for(rounding: float, optimizer: str) -> dict[str, float]:
    """Returns bounds for relative differences by rounding: of the loss, the gradient norm, and a tensor's update.

    `rounding` is the relative effect of rounding on a gradient, see `rounding_bound`; `optimizer` is
    `TrainingArguments.optim`.
    """
    # Measured with tiny models on 2 and 3 ranks: in fp32 gradient norms differ by 7e-7, updates of LoRA weights by
    # 1.3e-4 (the first steps of Adam are signs of gradients) and of all weights by 7e-5, with learning rates from 1e-3
    # down to 1e-6 with warm-up. Real models sum more numbers. In bf16: gradient norm 2.5e-3, updates of LoRA weights
    # 5.6e-2, of all weights 7e-2 in bf16 and 3e-2 if only the arithmetic is bf16.
    is_fine = rounding <= FINE
    weights = 1e-3 if is_fine and "8bit" not in optimizer else 2e-1
    return {"loss": 1e-4 if is_fine else 1e-2, "grad_norm": 1e-4 if is_fine else 2e-2, "weights": weights}


def compare(one: Values, many: Values) -> dict[str, Any]:
    """Compares steps and final weights of the run in one process and of that on several ranks.

    Returns a part of the receipt. `reasons` lists the differences and what could not be compared; empty = both agree.
    """
    facts, other_facts = one["facts"], many["facts"]
    bounds = bounds_for(max(facts["rounding"], other_facts["rounding"]), other_facts["optimizer"])
    steps = [_step(a, b) for a, b in zip(one["steps"], many["steps"], strict=False)]
    weights = _weights(one["updates"], many["updates"])
    reasons = [
        f"{name}: {facts[name]} in one process, {other_facts[name]} in the ranks"
        for name in _SAME_FACTS
        if facts[name] != other_facts[name]
    ]
    reasons += [reason for step in steps for reason in _reasons_of_step(step, bounds)]
    if len(one["steps"]) != len(many["steps"]):
        reasons.append(f"one process took {len(one['steps'])} steps, the ranks {len(many['steps'])}")
    wrong = [w for w in weights if w["counts"] and not w["relative"] <= bounds["weights"]]
    if wrong:
        reasons.append(
            f"weights: the updates of {len(wrong)} of {len(weights)} tensors differ, "
            f"{wrong[0]['name']} by {wrong[0]['relative']:.1e} (bound {bounds['weights']:.0e})"
        )
    reasons += _missing(steps, weights)
    return {"agree": not reasons, "reasons": reasons, "bounds": bounds, "steps": steps, "weights": weights}


def is_compared(step: Values) -> bool:
    """True if the ranks have compared gradients from the same weights."""
    return bool(step["compared"]) and not step["compared"]["not_compared"]


def _step(one: Values, many: Values) -> dict[str, Any]:
    found = {
        "step": one["step"],
        "num_samples": [sum(run["samples"].values()) for run in (one, many)],
        "has_same_samples": one["samples"] == many["samples"],
        "compared": many["compared"],
    }
    # Below 1 an absolute difference: some losses are zero on average.
    for name, at_least in (("loss", 1.0), ("grad_norm", 0.0)):
        found |= {name: [one[name], many[name]], f"{name}_difference": _relative(one[name], many[name], at_least)}
    return found


def _relative(one: float | None, many: float | None, at_least: float) -> float:
    """Returns the relative difference of two figures; 0 if both are None, infinity if one is None."""
    if one is None or many is None:
        return 0.0 if one is many else math.inf
    if not (math.isfinite(one) and math.isfinite(many)):
        # fp16 skips its first steps, which overflow: NaN and infinity count as equal.
        return math.inf if math.isfinite(one) or math.isfinite(many) else 0.0
    scale = max(abs(one), abs(many), at_least)
    return abs(one - many) / scale if scale else 0.0


def _weights(one: Values, many: Values) -> list[dict[str, Any]]:
    """Compares the updates of each trained tensor by their sketches, the largest difference that counts first."""
    found = []
    for name in sorted({*one, *many}):
        norms, relative, counts = [None, None], math.inf, True
        if name in one and name in many:
            (first, counts), (second, counts_too) = one[name], many[name]
            off = difference([first], [second], [name]).off
            # Infinity in place of NaN, which cannot be sorted.
            norms, relative, counts = [first[0], second[0]], math.inf if math.isnan(off) else off, counts or counts_too
        found.append({"name": name, "update_norm": norms, "relative": relative, "counts": counts})
    return sorted(found, key=lambda weight: (not weight["counts"], -weight["relative"]))


def _reasons_of_step(step: Values, bounds: Mapping[str, float]) -> Iterator[str]:
    where, compared = f"step {step['step']}", step["compared"]
    if not step["has_same_samples"]:
        one, many = step["num_samples"]
        yield f"{where}: other samples ({one} and {many} on one process and on the ranks)"
    if is_compared(step) and not compared["is_exact"]:
        off, bound = compared["difference"], compared["bound"]
        size = "is not finite in one of them" if off is None else f"differs by {off:.1e} (bound {bound:.0e})"
        yield f"{where}: the gradient from the same weights, as one process and as dealt, {size}"
    for name in ("loss", "grad_norm"):
        by, bound = step[f"{name}_difference"], bounds[name]
        if not by <= bound:
            shown = " and ".join("none" if value is None else f"{value:.6g}" for value in step[name])
            what = f"{name.replace('grad_', 'gradient ')} {shown} on one process and on the ranks"
            yield f"{where}: {what}, difference {by:.1e} (bound {bound:.0e})"


def _missing(steps: Sequence[Values], weights: Sequence[Values]) -> Iterator[str]:
    """Yields missing figures without which equality means nothing."""
    for step in steps:
        lacking = ["sample"] if step["num_samples"] == [0, 0] else []
        lacking += [name for name in ("loss", "grad_norm") if step[name] == [None, None]]
        yield from (f"step {step['step']}: {_NOTHING}, neither run has a {name}" for name in lacking)
    if not any(all(norm is not None and 0 < norm < math.inf for norm in step["grad_norm"]) for step in steps):
        yield f"{_NOTHING}: no step has a gradient norm above 0 that is a number; {_TOO_EARLY}"
    if not any(weight["counts"] for weight in weights):
        yield f"{_NOTHING}: no weights were moved; {_TOO_EARLY}"


def show(screen: Screen, receipt: Values, num_threads: str | None = None) -> None:
    """Prints a line per step, the weights, legitimate differences, the speed-up and the verdict.

    `num_threads` are the CPU threads of each process; None on a GPU.
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


def _cells(step: Values, bounds: Mapping[str, float]) -> Iterator[str]:
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


def _weights_line(weights: Sequence[Values], bound: float) -> str:
    counted = [weight for weight in weights if weight["counts"]]
    left_out = len(weights) - len(counted)
    text = f"updates of weights: {len(counted)} trained tensors"
    if counted:
        text += f", largest difference {counted[0]['relative']:.1e} in {counted[0]['name']} (bound {bound:.0e})"
    return text + (f"; {left_out} tensors with almost no change were left out" if left_out else "")


def _verdict(receipt: Values, ranks: str) -> Iterator[str]:
    if receipt["agree"]:
        yield f"One process and {ranks} agree over {len(receipt['steps'])} steps."
        return
    # No figure differs, but figures for a verdict are missing.
    has_nothing = all(_NOTHING in reason for reason in receipt["reasons"])
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
