"""A training that this package refused, and without which the script went on. Pure.

One GPU would have trained. A script that catches the refusal and saves its model would end with code 0, and the model
would be another one.
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

# A call of train() was refused, and a later one ended well.
REFUSED, MADE_UP_FOR = "refused", "made_up_for"
# What one process would not have met, at any step.
_OF_SEVERAL_RANKS = (ConfigError, SetupError, VersionError, PatchError, ResumeError, DivergenceError)


def is_refusal(error: BaseException, num_steps: int) -> bool:
    """True for an error of this package that ends a training which one process would have made.

    Args:
        error: What `train()` has raised.
        num_steps: Optimizer steps that this training has made.
    """
    if isinstance(error, DistributedError) and error.of_rank_0:
        return False  # Rank 0 knows whether one process would have met it.
    if isinstance(error, _OF_SEVERAL_RANKS):
        return True
    # A gradient that is no number is one in one process too. Later a script may know what a lost rank means.
    return isinstance(error, MultiGPUError) and not isinstance(error, NonFiniteGradientError) and num_steps == 0


def find_refusal(events: Sequence[Event]) -> tuple[int, str] | None:
    """The refusal that a run, all ranks of which ended with code 0, must not hide: its exit code and what happened.

    Args:
        events: All ranks' events of one attempt, oldest first.
    """
    last = {event.rank: event for event in events if event.kind in (REFUSED, MADE_UP_FOR)}
    for _, event in sorted(last.items()):
        if event.kind == REFUSED:
            step = int(event.facts["num_steps"])
            what = "train() was refused" if step < 1 else f"train() was ended after step {step}"
            return int(event.facts["exit_code"]), f"{what}: {event.facts['error']}; the script went on without it"
    return None
