"""What callbacks see of a training whose loop is fed with whole steps: the loader and the arguments of the script."""

from __future__ import annotations

from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.trainer_protocol import ArgumentsLike, StateLike, TrainerLike


class CallbackView(Part):
    """Shows callbacks what they would see in one process.

    The loop gets one item per optimizer step, and believes that nothing is accumulated. Callbacks read the script's own
    `gradient_accumulation_steps`, and in `train_dataloader` the loader of one process, with the script's data set.

    Args:
        steps: What feeds the trainer.
    """

    place = "view"

    def __init__(self, trainer: TrainerLike, steps: StepFeed) -> None:
        self._trainer = trainer
        self._steps = steps

    def overrides(self) -> dict[str, Override]:
        return {"call_event": self._call_event}

    def _call_event(
        self, original: Override, event: str, arguments: ArgumentsLike, state: StateLike, *args: Any, **kwargs: Any
    ) -> Any:
        """`CallbackHandler.call_event`.

        Raises:
            SetupError: A callback has changed what the steps of this training are made of.
        """
        if event == "on_train_begin" and self._steps.loader is not None:  # The loop has handed on its loader.
            handler = self._trainer.callback_handler
            self._steps.begin(handler.train_dataloader)
            handler.train_dataloader = self._steps.loader.one_process
        asked = self._steps.num_accumulated
        if event == "on_step_end":
            state.epoch = self._steps.metrics.epoch_of(state.epoch)
        before, arguments.gradient_accumulation_steps = arguments.gradient_accumulation_steps, asked
        try:
            result = original(event, arguments, state, *args, **kwargs)
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
