"""The interface of a part of a training: the Trainer methods that it replaces and the callback events it handles.

Also names for the types of a Trainer and its objects. All are `Any`: transformers and accelerate are imported inside
functions only, and mypy does not read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from torch import nn

    from unsloth_multigpu.group.manager import DDPManager

TrainerLike: TypeAlias = Any  # transformers.Trainer or a subclass
ArgumentsLike: TypeAlias = Any  # transformers.TrainingArguments
StateLike: TypeAlias = Any  # transformers.TrainerState
ControlLike: TypeAlias = Any  # transformers.TrainerControl
CallbackHandlerLike: TypeAlias = Any  # transformers.trainer_callback.CallbackHandler

# Replaces a method of a library. The original method is its first argument.
Override = Callable[..., Any]
# Events that a part may handle, in methods with `args, state, control, **kwargs` as in `transformers.TrainerCallback`.
EVENTS = (
    "on_train_begin",  # The model is wrapped, the optimizer made, a checkpoint loaded.
    "on_epoch_begin",  # Before the loop iterates over its loader.
    "on_step_begin",  # The samples of a step are loaded.
    "on_substep_end",  # After a micro-batch that is not the last of its step.
    "on_pre_optimizer_step",  # The gradient of the step is complete and clipped.
    "on_optimizer_step",  # The optimizer has stepped.
    "on_step_end",  # `state.global_step` has counted the step. Logging, evaluation and saving come next.
    "on_epoch_end",  # The loop is at the end of its loader, or leaves it.
    "on_log",  # A line was logged, `kwargs["logs"]`.
    "on_prediction_step",  # After a batch of an evaluation.
    "on_evaluate",  # After an evaluation, `kwargs["metrics"]`.
    "on_save",  # A checkpoint is complete.
    "on_train_end",  # After the loop, with the best checkpoint loaded.
)


class Part:
    """One concern of a steered training. `train.loop.Loop` attaches parts to a Trainer in the order of `PLACES`.

    It handles the `EVENTS` for which it has a method, after all callbacks of the script.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.

    Attributes:
        place: Its row in `train.loop.PLACES`.
        keeps: Attributes of the Trainer that the part changes during the training, such as "args.logging_steps". They
            are restored afterwards.
        may_be_missed: The training is correct even if its overrides are never called.
    """

    place: ClassVar[str]
    keeps: ClassVar[tuple[str, ...]] = ()
    may_be_missed: ClassVar[bool] = False

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = trainer
        self._manager = manager

    def overrides(self) -> Mapping[str, Override]:
        """Returns the methods that this part replaces, by their names in `seam.SEAMS`. Called inside `around`."""
        return {}

    def is_needed(self, seam: str) -> bool:
        """False if the training is correct even when this override is never called."""
        return not self.may_be_missed

    def ends_training(self) -> bool:
        """True at the end of the last epoch, also if it had fewer steps than planned, and if the training stops."""
        state, control = self._trainer.state, self._trainer.control
        is_over = state.global_step >= state.max_steps or state.epoch > state.num_train_epochs - 1
        return bool(is_over or control.should_training_stop)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Context of the training. It encloses the overrides of this part and the contexts of all later parts."""
        yield


class GradientExchange(Part):
    """Base of the parts that synchronize gradients or weights: DDP, FSDP2 and the strategies."""

    place = "exchange"

    @property
    def are_replicas_equal(self) -> bool:
        """False between two synchronizations, if ranks step independently."""
        return True

    @property
    def may_stop(self) -> bool:
        """False if stopping now would need an additional synchronization, which would change the training."""
        return True

    @property
    def parameters(self) -> Sequence[nn.Parameter] | None:
        """The parameters that are synchronized, once the training has begun; None = all that are trainable now."""
        return None

    def sent_bytes(self, num_steps: int) -> int | None:
        """Returns the bytes that this rank sends in `num_steps` steps; None if not known."""
        return None

    def before_read(self) -> None:
        """Called on every rank before weights are saved or evaluated."""

    def save_state(self, folder: Path) -> None:
        """Adds its state to a checkpoint."""

    def load_state(self, folder: Path) -> None:
        """Reads its state of the checkpoint from which the training resumes. Called on every rank."""


def generates_samples(trainer: TrainerLike) -> bool:
    """True for trainers that generate the completions that they train on: GRPO, RLOO, and GKD if it is on-policy."""
    is_on_policy = getattr(trainer, "lmbda", 0) > 0 or getattr(trainer, "seq_kd", False)
    return hasattr(trainer.args, "steps_per_generation") or (
        hasattr(trainer, "generate_on_policy_outputs") and is_on_policy
    )
