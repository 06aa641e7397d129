"""What callbacks see of a training whose loop is fed with whole steps: the loader and the arguments of the script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from unsloth_multigpu.core.seam import steered
from unsloth_multigpu.core.steps import StepFeed
from unsloth_multigpu.errors import SetupError


class CallbackView:
    """Shows callbacks what they would see in one process.

    The loop gets one item per optimizer step, and believes that nothing is accumulated. Callbacks read the script's own
    `gradient_accumulation_steps`, and in `train_dataloader` the loader of one process, with the script's data set.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        steps: What feeds the trainer.
    """

    def __init__(self, trainer: Any, steps: StepFeed) -> None:
        self._trainer = trainer
        self._steps = steps

    @contextmanager
    def on_trainer(self) -> Iterator[None]:
        """Puts our methods on the handler of the trainer's callbacks for the time of the training."""
        handler = self._trainer.callback_handler
        with ExitStack() as stack:
            for name, override in (("on_train_begin", self._on_train_begin), ("call_event", self._call_event)):
                stack.enter_context(steered(handler, name, override))
            yield

    def _on_train_begin(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`CallbackHandler.on_train_begin`, before which the loop has handed on its loader."""
        if self._steps.loader is not None:
            self._trainer.callback_handler.train_dataloader = self._steps.loader.one_process
        return original(*args, **kwargs)

    def _call_event(self, original: Callable[..., Any], event: str, *args: Any, **kwargs: Any) -> Any:
        """`CallbackHandler.call_event`.

        Raises:
            SetupError: A callback has changed what the steps of this training are made of.
        """
        arguments, asked = self._trainer.args, self._steps.num_accumulated
        before, arguments.gradient_accumulation_steps = arguments.gradient_accumulation_steps, asked
        try:
            result = original(event, *args, **kwargs)
            now = arguments.gradient_accumulation_steps
        finally:
            arguments.gradient_accumulation_steps = before
        if now != asked:
            raise SetupError(
                f"A callback has set gradient_accumulation_steps from {asked} to {now} in {event}, while the steps of "
                "this training are dealt already.",
                hint="Call train() once for each value, with resume_from_checkpoint, or use global_batch='scale'.",
            )
        return result
