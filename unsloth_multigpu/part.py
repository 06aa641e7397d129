"""The contract of a part of a training: the methods of the Trainer that it replaces, and the events that it handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unsloth_multigpu.trainer_protocol import TrainerLike

if TYPE_CHECKING:
    from torch import nn

    from unsloth_multigpu.group.manager import DDPManager

# Replaces a method of a library. The original method is its first argument.
Override = Callable[..., Any]
# What a part may handle, in methods with `args, state, control, **kwargs`, as those of `transformers.TrainerCallback`.
EVENTS = (
    "on_train_begin",  # The model is wrapped, the optimizer made, a checkpoint loaded.
    "on_epoch_begin",  # The loop is about to walk through its loader.
    "on_step_begin",  # The samples of a step are there.
    "on_substep_end",  # A micro-batch is done, and its step is not.
    "on_pre_optimizer_step",  # The gradient of the step is whole and clipped.
    "on_optimizer_step",  # The optimizer has stepped.
    "on_step_end",  # `state.global_step` has counted the step. Logging, evaluation and saving come next.
    "on_epoch_end",  # The loop is at the end of its loader, or leaves it.
    "on_log",  # A line was logged, `kwargs["logs"]`.
    "on_prediction_step",  # A batch of an evaluation is done.
    "on_evaluate",  # An evaluation is done, `kwargs["metrics"]`.
    "on_save",  # A checkpoint is whole.
    "on_train_end",  # The loop is over, and the best checkpoint is loaded.
)


class Part:
    """One concern of a training that we steer. `train.loop.Loop` attaches parts to a Trainer in the order of its table.

    It handles those of `EVENTS` of which it has a method. All callbacks of the script have handled an event before.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.

    Attributes:
        place: Its row in `train.loop.PLACES`.
        keeps: Attributes of the Trainer that the part changes while it trains, such as "args.logging_steps". They are
            restored after the training.
    """

    place: ClassVar[str]
    keeps: ClassVar[tuple[str, ...]] = ()

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = trainer
        self._manager = manager

    def overrides(self) -> Mapping[str, Override]:
        """Returns a replacement for each method that this part replaces, by its name in `seam.SEAMS`.

        Called after `around` was entered.
        """
        return {}

    def is_needed(self, seam: str) -> bool:
        """False if a training is right even when this part's override of `seam` is never called."""
        return True

    @contextmanager
    def around(self) -> Iterator[None]:
        """A context that is open while the Trainer trains, around the methods of this part and of all later parts."""
        yield


class GradientExchange(Part):
    """Exchanges gradients or weights between ranks, as the rest of a training sees it: DDP, FSDP2 or a strategy."""

    place = "exchange"

    @property
    def are_replicas_equal(self) -> bool:
        """False between two meetings, for ranks that step independently."""
        return True

    @property
    def may_stop(self) -> bool:
        """False where a stop would need an additional meeting, which would change the training."""
        return True

    @property
    def parameters(self) -> Sequence[nn.Parameter] | None:
        """What it exchanges, once the training has begun; None = what is trainable, which is followed."""
        return None

    def sent_bytes(self, num_steps: int) -> int | None:
        """What this rank has sent in a training of so many steps; None where it is not known."""
        return None

    def save_state(self, folder: Path) -> None:
        """Adds its state to a checkpoint."""
