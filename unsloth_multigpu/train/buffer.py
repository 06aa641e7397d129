"""Gives all ranks rank 0's buffers, such as running statistics, and its metrics in evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.replicas import persistent_buffers, tensor_hashes
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.words import listed

logger = get_logger(__name__)


class EqualEvaluations(Part):
    """Gives all ranks rank 0's buffers before an evaluation and at the end of a training, and callbacks its metrics.

    DDP copies rank 0's buffers at the start of a step, so they differ again after it. A warning names buffers that the
    training has changed: their values are not those of one process, because each rank has seen only its own samples.
    """

    place = "buffers"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        super().__init__(trainer, manager)
        self._at_begin: dict[str, int] = {}
        self._has_warned = False

    def overrides(self) -> dict[str, Override]:
        return {"evaluation_loop": self._evaluation_loop, "on_evaluate": self._decide_alike}

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._at_begin = _hashes(self._buffers())

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.evaluation_loop`, in which each rank uses its own buffers."""
        self.make_equal()
        return original(*args, **kwargs)

    def _decide_alike(
        self, original: Callable[..., Any], args: ArgumentsLike, state: StateLike, control: ControlLike, metrics: Any
    ) -> Any:
        """Overrides `CallbackHandler.on_evaluate`: callbacks such as early stopping see rank 0's metrics on all ranks.

        A script's own `evaluate` may have added numbers to the metrics of the loop.
        """
        metrics.update(self._manager.broadcast_numbers(metrics))
        return original(args, state, control, metrics)

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.make_equal()

    def make_equal(self) -> None:
        """Copies rank 0's buffers to ranks with other values. Collective if the model has buffers."""
        buffers = self._buffers()
        if not buffers:
            return
        hashes = _hashes(buffers)
        changed = [name for name, value in hashes.items() if self._at_begin.get(name) != value]
        if changed and not self._has_warned and self._manager.identity.rank == 0:
            self._has_warned = True
            logger.warning(
                "training changes buffers of the model. They are not those of one process: each rank changes its own "
                "by its samples, and rank 0's count, as with DDP: %s",
                listed(changed),
            )
        facts = {name: [f"{tuple(buffer.shape)} {buffer.dtype}", hashes[name]] for name, buffer in buffers.items()}
        ranks = self._manager.gather_json(facts)
        for name, (shape, _) in ranks[0].items():
            of_ranks = [rank.get(name) for rank in ranks]
            # A buffer that has another shape on some rank stays as it is.
            if of_ranks != of_ranks[:1] * len(ranks) and all(other and other[0] == shape for other in of_ranks):
                self._manager.broadcast_tensors([buffers[name]])

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of the model by name, without those that DDP ignores."""
        model = self._trainer.model
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        return {
            name: buffer
            for name, buffer in persistent_buffers(model)
            if name not in ignored
            and not (buffer.is_meta or buffer.layout != torch.strided or is_traceable_wrapper_subclass(buffer))
        }


def _hashes(buffers: dict[str, torch.Tensor]) -> dict[str, int]:
    return dict(zip(buffers, tensor_hashes(list(buffers.values())), strict=True))
