"""Names for the types of a Trainer and its objects, and whether one draws what it trains on.

Each says which class of transformers or accelerate is meant. All are `Any`: these libraries are imported inside
functions only, and mypy does not read them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

TrainerLike: TypeAlias = Any  # transformers.Trainer or a subclass
ArgumentsLike: TypeAlias = Any  # transformers.TrainingArguments
StateLike: TypeAlias = Any  # transformers.TrainerState
ControlLike: TypeAlias = Any  # transformers.TrainerControl
CallbackHandlerLike: TypeAlias = Any  # transformers.trainer_callback.CallbackHandler


def draws_completions(trainer: TrainerLike) -> bool:
    """True for trainers whose ranks draw the completions that they train on: GRPO, RLOO, and GKD if it is on-policy."""
    is_on_policy = getattr(trainer, "lmbda", 0) > 0 or getattr(trainer, "seq_kd", False)
    return hasattr(trainer.args, "steps_per_generation") or (
        hasattr(trainer, "generate_on_policy_outputs") and is_on_policy
    )
