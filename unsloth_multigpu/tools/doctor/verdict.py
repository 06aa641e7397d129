"""What the doctor's rows come to: the last line, for people. Pure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unsloth_multigpu.accelerator import CHOOSERS
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.words import gib

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
    named = ", ".join(failed[:_MOST_NAMES])
    if len(failed) > _MOST_NAMES:
        named += f" and {len(failed) - _MOST_NAMES} more"
    return f"NOT READY: {len(failed)} of {len(rows)} checks failed: {named}. Once that is mended: {sentence}"


def what_runs(rows: Sequence[CheckRow], config: MultiGPUConfig) -> str:
    """What a script with the line would run on here."""
    if any(row.section == "devices" and row.state == "FAIL" for row in rows):
        return "devices could not be looked at, so what a script would run on is not known."
    cards = [row.facts for row in rows if row.section == "devices" and {"name", "total_bytes"} <= row.facts.keys()]
    names = [f"{card['name']} ({gib(card['total_bytes'], 1)} each)" for card in cards]
    if not config.enable_ddp:
        copies = f"with a copy of the model on {len(cards) or 1} device(s)"
        return f"enable_ddp=False is set: this process trains alone, {copies}."
    if config.device not in ("auto", "cpu") and not cards:
        return f"device={config.device!r} is set and no such device is visible: the line would refuse to start."
    if config.device != "cpu" and cards and (config.num_gpus or 1) > len(cards):
        return f"num_gpus={config.num_gpus} is set and {len(cards)} GPU(s) are visible: the line would refuse to start."
    on_node = "" if config.nnodes == "1" else f" on this node, of nnodes={config.nnodes}"
    if on_node and (config.num_gpus or len(cards) or 1) == 1:
        return f"A script with the line would run 1 rank{on_node}."
    if config.device == "cpu" or not cards:
        why = "device='cpu' is set" if cards else "No GPU is visible"
        if (config.num_gpus or 1) == 1:
            more = "; num_gpus=2 runs 2 CPU ranks" if config.num_gpus is None else ""
            return f"{why}: enable_multi_gpu() trains in this process alone, on the CPU{more}."
        return f"{why}: a script with the line would run {config.num_gpus} ranks on the CPU (num_gpus is set)."
    num_ranks = min(config.num_gpus or len(cards), len(cards))
    if num_ranks == 1:
        one = names[0].replace(" each)", ")")
        chosen = ", ".join(f"{name}={os.environ[name]}" for name in CHOOSERS if name in os.environ)
        why = f" ({chosen})" if chosen and len(cards) == 1 else ""
        seen = f"1 GPU is visible{why}" if len(cards) == 1 else f"{len(cards)} GPUs are visible, and num_gpus=1 is set"
        return f"{seen}: enable_multi_gpu() trains in this process alone, on {one}."
    counted = Counter(names[:num_ranks])
    shown = " and ".join(
        f"{count} x {name}" if count > 1 else name.replace(" each)", ")") for name, count in counted.items()
    )
    unused = f" {len(cards) - num_ranks} more are not used (num_gpus={num_ranks})." if len(cards) > num_ranks else ""
    return f"A script with the line would run {num_ranks} ranks on {shown}{on_node}.{unused}"
