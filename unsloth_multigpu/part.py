"""The contract of what steers a training: methods of the Trainer that it stands in for, and events that it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike

# Stands in the place of a library's method, which it is given first.
Override = Callable[..., Any]


class Part:
    """One concern of a training that we steer. `train.loop.Loop` puts parts on a Trainer, in the order of its table.

    The events are those of `transformers.TrainerCallback`, with the same arguments. All callbacks of the script have
    answered before.

    Attributes:
        place: Its row in `train.loop.PLACES`.
        keeps: Attributes of the Trainer that the part changes while it trains, such as "args.logging_steps". They are
            put back behind the training.
    """

    place: ClassVar[str]
    keeps: ClassVar[tuple[str, ...]] = ()

    def overrides(self) -> Mapping[str, Override]:
        """What stands in the place of which method, by names of `seam.SEAMS`. Asked inside of `around`."""
        return {}

    def is_needed(self, seam: str) -> bool:
        """False where a training is right although this part's override of `seam` is never called."""
        return True

    @contextmanager
    def around(self) -> Iterator[None]:
        """Open while the Trainer trains: around the methods of this part and all parts behind it."""
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
