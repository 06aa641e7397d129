"""Counts the seconds in which this rank waits for others while it computes a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.measure import Stopwatch
from unsloth_multigpu.trainer_protocol import TrainerLike


class Waiting(Part):
    """Adds the exchange of gradients to `manager.waits`: from this rank's last gradient to the end of the backward.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager, one of several.
    """

    place = "waits"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._waits = manager.waits
        self._watch = Stopwatch(lambda: trainer.model, trainer.args.device)

    @contextmanager
    def around(self) -> Iterator[None]:
        with self._watch.on_model():
            yield

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step}

    def is_needed(self, seam: str) -> bool:
        return False  # Without it less is known.

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.training_step` of one micro-batch."""
        self._watch.start()
        result = original(*args, **kwargs)
        if self._watch.last_gradient is not None:
            self._waits.add(self._watch.last_gradient, self._waits.now())
        return result
