"""What the doctor's rows come to: the last line, for people. Pure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unsloth_multigpu.accelerator import CHOOSERS
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.words import gib, listed

if TYPE_CHECKING:
    from unsloth_multigpu.tools.doctor.findings import CheckRow

# More names of failed checks than these are counted.
_MOST_NAMES = 5


def verdict(rows: Sequence[CheckRow], config: MultiGPUConfig) -> str:
    """One line: which checks failed, and what a script with the line would run on.

    Args:
        rows: Of all sections.
        config: What variables and files ask of a run on this machine.
    """
    failed = [f"{row.name} ({row.section})" for row in rows if row.state == "FAIL"]
    sentence = what_runs(rows, config)
    if not failed:
        return sentence
    named = listed(failed, _MOST_NAMES)
    return f"NOT READY: {len(failed)} of {len(rows)} checks failed: {named}. Once that is mended: {sentence}"


def what_runs(rows: Sequence[CheckRow], config: MultiGPUConfig) -> str:
    """What a script with the line would run on here."""
    if any(row.section == "devices" and row.state == "FAIL" for row in rows):
        return "devices could not be looked at, so what a script would run on is not known."
    cards = [row.facts for row in rows if row.section == "devices" and {"name", "total_bytes"} <= row.facts.keys()]
    if not config.enable_ddp:
        copies = f"with a copy of the model on {len(cards) or 1} device(s)"
        return f"enable_ddp=False is set: this process trains alone, {copies}."
    if config.device not in ("auto", "cpu") and not cards:
        return f"device={config.device!r} is set and no such device is visible: the line would refuse to start."
    is_on_cpu = config.device == "cpu" or not cards
    num_ranks = config.num_gpus or (1 if is_on_cpu else len(cards))
    if num_ranks > len(cards) and not is_on_cpu:
        return f"num_gpus={num_ranks} is set and {len(cards)} GPU(s) are visible: the line would refuse to start."
    names = Counter(f"{card['name']} ({gib(card['total_bytes'], 1)})" for card in cards[:num_ranks])
    place = "the CPU" if is_on_cpu else " and ".join(f"{count} x {name}" for name, count in names.items())
    if config.nnodes != "1":
        return f"A script with the line would run {num_ranks} rank(s) on {place} of this node; nnodes={config.nnodes}."
    # What decides on the number of ranks: devices, the variables that choose among them, options.
    reasons = [f"{len(cards)} GPU(s) are visible" if cards else "No GPU is visible"]
    reasons += [f"{name}={os.environ[name]}" for name in CHOOSERS if name in os.environ]
    reasons += ["device='cpu'"] if config.device == "cpu" else []
    reasons += [f"num_gpus={config.num_gpus}"] if config.num_gpus is not None else []
    if num_ranks > 1:
        return f"{', '.join(reasons)}: a script with the line would run {num_ranks} ranks on {place}."
    more = "; num_gpus=2 runs 2 CPU ranks" if is_on_cpu and config.num_gpus is None else ""
    return f"{', '.join(reasons)}: enable_multi_gpu() trains in this process alone, on {place}{more}."
