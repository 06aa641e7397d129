"""Guards one training: says where the rank is, so that its supervisor can tell a slow rank from a hung one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from unsloth_multigpu.core.manager import DDPManager
from unsloth_multigpu.core.steps import instance_attribute
from unsloth_multigpu.fault.beat import BeatPage, Phase
from unsloth_multigpu.report import EventWriter


class Guard:
    """Marks the phases of a training on this rank's page.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        events: Where the rank's events go, if a supervisor reads them.
        beat: This rank's page.
    """

    def __init__(self, trainer: Any, manager: DDPManager, events: EventWriter | None, beat: BeatPage) -> None:
        self.trainer = trainer
        self.manager = manager
        self.events = events
        self.beat = beat

    @contextmanager
    def on_trainer(self) -> Iterator[None]:
        """Puts our methods on the trainer instance for the time of the training.

        Opened after the overrides that choose samples and exchange gradients: what is done inside those is seen here
        as one phase.
        """
        trainer = self.trainer
        phases = {
            "get_batch_samples": Phase.DATA,
            "training_step": Phase.COMPUTE,
            "evaluate": Phase.EVALUATE,
            "_save_checkpoint": Phase.SAVE,
        }
        callback = _phase_callback(self.beat)
        with ExitStack() as stack:
            for name, phase in phases.items():
                within = functools.partial(self._within, phase, getattr(trainer, name))
                stack.enter_context(instance_attribute(trainer, name, within))
            trainer.add_callback(callback)
            stack.callback(trainer.remove_callback, callback)
            stack.callback(self.beat.mark, Phase.SCRIPT)
            self.beat.mark(Phase.SETUP, step=0)
            yield

    def _within(self, phase: Phase, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.beat.phase
        self.beat.mark(phase)
        result = original(*args, **kwargs)
        # A step's last backward pass is followed by its update, and that by the next step's samples.
        self.beat.mark({Phase.DATA: Phase.COMPUTE, Phase.COMPUTE: Phase.UPDATE}.get(phase, before))
        return result


def _phase_callback(beat: BeatPage) -> Any:
    from transformers import TrainerCallback

    class PhaseCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            beat.mark(step=state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            beat.mark(Phase.UPDATE, step=state.global_step, micro_batch=0)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            beat.mark()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            beat.mark(Phase.ENDED)

    return PhaseCallback()
