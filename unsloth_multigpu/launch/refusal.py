"""Finds trainings that this package refused although one GPU would have trained. Pure.

A script that catches the refusal and saves its untrained model would exit with 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from unsloth_multigpu.errors import (
    ConfigError,
    DistributedError,
    DivergenceError,
    MultiGPUError,
    NonFiniteGradientError,
    PatchError,
    ResumeError,
    SetupError,
    VersionError,
)
from unsloth_multigpu.wire.event import Event

# Event: a call of train() was refused. A later "trained" of the rank withdraws it.
REFUSED = "refused"
# Errors that one process would not have raised, at any step.
_OF_SEVERAL_RANKS = (ConfigError, SetupError, VersionError, PatchError, ResumeError, DivergenceError)


def is_refusal(error: BaseException, num_steps: int) -> bool:
    """True for an error of `train()` that one process would not have raised. `num_steps` are those that it has made."""
    if isinstance(error, DistributedError) and error.of_rank_0:
        return False  # Rank 0 decides about its own error.
    if isinstance(error, _OF_SEVERAL_RANKS):
        return True
    # A NaN gradient also occurs in one process. A script may handle a lost rank after the first step.
    return isinstance(error, MultiGPUError) and not isinstance(error, NonFiniteGradientError) and num_steps == 0


def find_refusal(events: Sequence[Event]) -> tuple[int, str] | None:
    """Returns exit code and text of a refused training, in a run whose ranks all exited with 0; else None."""
    last = {event.rank: event for event in events if event.kind in (REFUSED, "trained")}
    for _, event in sorted(last.items()):
        if event.kind == REFUSED:
            step = int(event.facts["num_steps"])
            what = "train() was refused" if step < 1 else f"train() was ended after step {step}"
            return int(event.facts["exit_code"]), f"{what}: {event.facts['error']}; the script continued without it"
    return None
