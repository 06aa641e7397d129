"""Buffers of a model that change while ranks train, such as running statistics: rank 0's count, as with DDP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.replicas import tensor_hashes
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.digest import digest_int64

logger = get_logger(__name__)

_NUM_NAMED = 4


class EqualBuffers(Part):
    """Makes the buffers that a checkpoint keeps equal on all ranks before an evaluation and at the end of a training.

    DDP gives every rank rank 0's buffers as a step begins, so after a step they differ again. All are compared by
    hashes, and only those that differ are sent. A warning names what training has changed: these values are not those
    of one process, because each rank has seen its own samples only.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
    """

    place = "buffers"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = trainer
        self._manager = manager
        self._at_begin: dict[str, Any] = {}
        self._is_told = False

    def overrides(self) -> dict[str, Override]:
        return {"evaluation_loop": self._evaluation_loop}

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._at_begin = _facts(self._trainer.model)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluation_loop`, in which each rank computes its rows with its own buffers."""
        self.make_equal()
        return original(*args, **kwargs)

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.make_equal()

    def make_equal(self) -> None:
        """Gives every rank rank 0's values of buffers that differ. Collective: one number where none does."""
        facts = _facts(self._trainer.model)
        self._tell([name for name, fact in facts.items() if self._at_begin.get(name) != fact])
        text = json.dumps(facts)
        digests = self._manager.gather_int64([digest_int64(text.encode())])
        if all(row == digests[0] for row in digests):
            return
        first, *others = (json.loads(gathered) for gathered in self._manager.gather_texts(text))
        for name, module, key, _ in kept_buffers(self._trainer.model):
            if all(name in rank for rank in (first, *others)) and any(rank[name] != first[name] for rank in others):
                self._send(module, key, *first[name][:2])

    def _tell(self, changed: Sequence[str]) -> None:
        if not changed or self._is_told or self._manager.identity.rank:
            return
        self._is_told = True
        more = f" and {len(changed) - _NUM_NAMED} more" if len(changed) > _NUM_NAMED else ""
        logger.warning(
            "training changes buffers of the model. They are not those of one process: each rank changes its own by "
            "its samples, and rank 0's count, as with DDP: %s%s",
            ", ".join(changed[:_NUM_NAMED]),
            more,
        )

    def _send(self, module: nn.Module, key: str, shape: list[int], dtype: str) -> None:
        buffer, kind = module._buffers[key], getattr(torch, dtype)
        assert buffer is not None
        if list(buffer.shape) != shape or buffer.dtype != kind:  # One that grows.
            buffer = module._buffers[key] = torch.empty(shape, dtype=kind, device=buffer.device)
        self._manager.broadcast_tensors([buffer])


def kept_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Name, owner, the owner's name for it, and tensor of each plain buffer that a checkpoint keeps.

    Others are what each rank computes for itself, such as tables of positions. Nor those that DDP is to leave alone.
    """
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is None or key in module._non_persistent_buffers_set or name in ignored:
                continue
            if not buffer.is_meta and buffer.layout == torch.strided and not is_traceable_wrapper_subclass(buffer):
                yield name, module, key, buffer


def _facts(model: nn.Module) -> dict[str, list[Any]]:
    """Shape, dtype and hash of each buffer, as JSON values."""
    buffers = {name: buffer for name, _, _, buffer in kept_buffers(model)}
    return {
        name: [list(buffer.shape), str(buffer.dtype).removeprefix("torch."), fingerprint]
        for (name, buffer), fingerprint in zip(buffers.items(), tensor_hashes(list(buffers.values())), strict=True)
    }
