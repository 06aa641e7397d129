"""Which faults `unsloth-multigpu chaos` plants: every kind once, or many at random. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from unsloth_multigpu.launch.watchdog import LONGEST_FACTOR
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
# From a fault until the last process is gone; measured 0.3 to 2.
_END_S = 1.5
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


@dataclass(frozen=True)
class Costs:
    """What the run without faults took, in seconds.

    Args:
        run_s: All of it.
        cold_s: From its start to the end of its first step.
        num_steps: Optimizer steps of its first training.
        hang_timeout_s: Option of the run.
        resumes: The command is started again after each fault.
    """

    run_s: float
    cold_s: float
    num_steps: int
    hang_timeout_s: float
    resumes: bool

    def of(self, trial: Trial) -> float:
        """Expected seconds of a row: each fault with the way to it, and the rest of the training behind the last."""
        train_s = max(0.0, self.run_s - self.cold_s)
        total_s = 0.0
        for fault in trial.faults:
            end = KINDS[fault.kind]
            if end is End.NONE:
                continue
            hang_s = self.hang_timeout_s * (LONGEST_FACTOR if fault.phase != "train" else 1)
            total_s += self.cold_s + train_s * min(1.0, fault.step / self.num_steps) / len(trial.faults)
            total_s += hang_s if end is End.HANG else _END_S
        goes_on = self.resumes or trial.num_restarts or all(KINDS[f.kind] is End.NONE for f in trial.faults)
        return total_s + (self.run_s if goes_on else 0.0)
