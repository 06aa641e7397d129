"""Counts the seconds in which this rank waits for others while it computes a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.measure import Stopwatch
from unsloth_multigpu.trainer_protocol import TrainerLike


class Waiting(Part):
    """Adds to `manager.waits` where DDP synchronizes with the other ranks.

    That is before a forward pass, where it makes buffers equal, and the exchange of gradients, from this rank's last
    gradient until the backward pass is over. Under a compiler that has the whole model the former is not counted.
    """

    place = "waits"
    may_be_missed = True

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._waits = manager.waits
        self._watch = Stopwatch(lambda: trainer.model, trainer.args.device)
        self._hooks = ExitStack()
        self._hooked: nn.Module | None = None
        self._is_computing = False
        self._forward: Any = None

    @contextmanager
    def around(self) -> Iterator[None]:
        with self._hooks, self._watch.on_model():
            yield

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step}

    def _training_step(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if model is not self._hooked:
            self._watch_forward(model)
        self._watch.start()
        self._is_computing = True
        try:
            result = original(model, *args, **kwargs)
        finally:
            self._is_computing = False
        if self._watch.last_gradient is not None:
            self._waits.add(self._watch.last_gradient, self._waits.now())
        return result

    def _watch_forward(self, model: nn.Module) -> None:
        """Hooks where DDP's forward pass begins, and where that of its module does: in between it synchronizes."""
        self._hooks.close()
        self._hooked = model
        inner: nn.Module | None = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        # `torch.compile(model)` and `model.compile()`: the hook would be compiled as well.
        is_compiled = hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
        if inner is not None and not is_compiled:
            self._hooks.callback(model.register_forward_pre_hook(self._enter_ddp).remove)
            self._hooks.callback(inner.register_forward_pre_hook(self._enter_module).remove)

    def _enter_ddp(self, *_: Any) -> None:
        if self._is_computing:
            self._forward = self._waits.now()

    def _enter_module(self, *_: Any) -> None:
        # A checkpointed model may be called again in the backward pass.
        begin, self._forward = self._forward, None
        if begin is not None:
            self._waits.add(begin, self._waits.now())
