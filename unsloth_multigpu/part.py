"""The contract of a part of a training: the methods of the Trainer that it replaces, and the events that it handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike

if TYPE_CHECKING:
    from torch import nn

# Replaces a method of a library. The original method is its first argument.
Override = Callable[..., Any]


class Part:
    """One concern of a training that we steer. `train.loop.Loop` attaches parts to a Trainer in the order of its table.

    The events are those of `transformers.TrainerCallback`, with the same arguments. All callbacks of the script have
    handled an event before a part does.

    Attributes:
        place: Its row in `train.loop.PLACES`.
        keeps: Attributes of the Trainer that the part changes while it trains, such as "args.logging_steps". They are
            restored after the training.
    """

    place: ClassVar[str]
    keeps: ClassVar[tuple[str, ...]] = ()

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

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """The model is wrapped, the optimizer made, a checkpoint loaded."""

    def on_epoch_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """The loop is about to walk through its loader."""

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """The samples of a step are there."""

    def on_substep_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """A micro-batch is done, and its step is not."""

    def on_pre_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """The gradient of the step is whole and clipped."""

    def on_optimizer_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """The optimizer has stepped."""

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """`state.global_step` has counted the step. Logging, evaluation and saving come next."""

    def on_epoch_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """The loop is at the end of its loader, or leaves it."""

    def on_log(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """A line was logged, `kwargs["logs"]`."""

    def on_prediction_step(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """A batch of an evaluation is done."""

    def on_evaluate(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """An evaluation is done, `kwargs["metrics"]`."""

    def on_save(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """A checkpoint is whole."""

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """The loop is over, and the best checkpoint is loaded."""


EVENTS = tuple(name for name in vars(Part) if name.startswith("on_"))


class GradientExchange(Part):
    """Exchanges gradients or weights between ranks in place of DDP, as the rest of a training sees it."""

    place = "exchange"

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What it exchanges, once the training has begun."""
        raise NotImplementedError

    @property
    def are_replicas_equal(self) -> bool:
        """False between two meetings, for ranks that step independently."""
        raise NotImplementedError

    @property
    def may_stop(self) -> bool:
        """False where a stop would need an additional meeting, which would change the training."""
        raise NotImplementedError

    @property
    def sent_bytes(self) -> int | None:
        """What this rank has sent; None where it is not known."""
        raise NotImplementedError

    def save_state(self, folder: Path) -> None:
        """Adds its state to a checkpoint."""
        raise NotImplementedError
