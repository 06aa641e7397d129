"""Which faults `unsloth-multigpu chaos` plants: every kind once, or many at random. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from unsloth_multigpu.tools.chaos.fault import CURABLE, DAMAGES, KINDS, End, Fault, parse_fault

# Each kind, on the rank and in the phase where it differs; {last} is the highest rank, {step} one in the middle.
_ALL = (
    "raise@0:{step}",
    "raise@{last}:{step}",
    "exit@{last}:{step}",
    "os_exit@{last}:{step}",
    "kill@0:{step}",
    "kill@{last}:{step}",
    "kill@0:{step}:save",
    "segv@{last}:{step}",
    "kill_supervisor@0:{step}",
    "stop@0:{step}",
    "stop@{last}:{step}",
    "loop@{last}:{step}",
    "memory@{last}:{step}",
    "nan@{last}:{step}",
    "disk_full@0:{step}:save",
    "corrupt@0:{step}",
    "sigterm@0:{step}",
    "sigterm@0:{step}:save",
    "sigterm@0:{step}:evaluate",
    "sigusr1@0:{step}",
    "sigint@0:{step}",
    "sigint_twice@0:{step}",
    "cut@{last}:{step}",
    "store@all:{step}",
    "clock@{last}:{step}",
    "slow@{last}:{step}",
)
# Kinds that can also strike between two files of a checkpoint. No hangs: their limit is ten times longer there.
_ALSO_WHILE_SAVING = ("raise", "exit", "os_exit", "kill", "segv")


@dataclass(frozen=True)
class Trial:
    """One row: the faults of one run.

    Args:
        name: What the row is called.
        faults: To be planted, one for each start of the ranks.
        num_restarts: How often the ranks must be started again for all of them.
    """

    name: str
    faults: tuple[Fault, ...]
    num_restarts: int = 0


def all_trials(num_steps: int, num_ranks: int, checkpoint_files: Sequence[str]) -> list[Trial]:
    """Every kind of fault, in the middle of a training.

    Args:
        num_steps: Optimizer steps of the training.
        checkpoint_files: Names of the files of one checkpoint; without any, nothing is damaged.
    """
    # After the first checkpoints of most trainings, with steps left.
    step = max(1, round(num_steps * 0.6))
    trials = []
    for text in _ALL:
        fault = parse_fault(text.format(last=num_ranks - 1, step=step))
        if fault.kind != "corrupt":
            trials.append(Trial(str(fault), (fault,)))
        elif checkpoint_files:
            trials.append(torn_trial(step, checkpoint_files))
    return trials


def torn_trial(step: int, checkpoint_files: Sequence[str]) -> Trial:
    """One run in which rank 0 damages another file of the newest checkpoint in each start, and is killed."""
    faults = [
        Fault("corrupt", 0, step, attempt=i, file=file, damage=DAMAGES[i % len(DAMAGES)])
        for i, file in enumerate(checkpoint_files)
    ]
    return Trial(f"corrupt@0:{step}, each file", tuple(faults), num_restarts=len(faults))


def random_trial(num_faults: int, seed: int, num_steps: int, num_ranks: int) -> Trial:
    """One run that meets `num_faults` faults, each in a start of its own. Their steps grow, so that all are reached."""
    draw = random.Random(seed)
    kinds = [kind for kind in CURABLE if KINDS[kind] is not End.NONE]
    faults = []
    for attempt, step in enumerate(sorted(draw.randrange(1, num_steps + 1) for _ in range(num_faults))):
        kind, rank = draw.choice(kinds), draw.randrange(num_ranks)
        # Where a checkpoint is damaged or the disk is full, rank 0 is the one that writes.
        rank = 0 if kind in ("corrupt", "disk_full") else rank
        phase = draw.choice(("train", "save")) if kind in _ALSO_WHILE_SAVING else "train"
        faults.append(Fault(kind, rank, step, attempt, phase, damage=draw.choice(DAMAGES)))
    return Trial(f"{num_faults} random faults, seed {seed}", tuple(faults), num_restarts=num_faults)
