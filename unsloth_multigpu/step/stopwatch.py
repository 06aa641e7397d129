"""Times the computation of micro-batches, without the wait for other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class Stopwatch:
    """Runs from the start of a micro-batch until the last gradient is there.

    The model's first trainable parameter gets its gradient last. In DDP the wait for other ranks comes after that, at
    the end of the backward pass. On a GPU it reads the device's own clock, and nothing waits for the device.

    Args:
        model: Gives the model whose parameters are trained; asked in the first micro-batch. `model_init` makes it in
            the midst of `train()`.
        device: Where.
    """

    def __init__(self, model: Callable[[], nn.Module], device: torch.device) -> None:
        self._model = model
        self._is_open = False
        self._watched: ExitStack | None = None
        self._device = device
        self._begin: Any = None
        self._end: Any = None

    @contextmanager
    def on_model(self) -> Iterator[None]:
        """Watches the parameter for the time of a training."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            if self._watched is not None:
                self._watched.close()
                self._watched = None

    def _watch(self) -> ExitStack:
        stack = ExitStack()
        first = next((p for p in self._model().parameters() if p.requires_grad), None)
        if first is not None:
            stack.callback(first.register_post_accumulate_grad_hook(self._arrived).remove)
        return stack

    def _arrived(self, _: torch.Tensor) -> None:
        self._end = self._now()

    def start(self) -> None:
        """Called before the forward pass."""
        if self._is_open and self._watched is None:
            self._watched = self._watch()
        self._end = None
        self._begin = self._now()

    def lap(self) -> Lap | None:
        """Called after the backward pass; None where the parameter got no gradient."""
        return None if self._end is None else Lap(self._begin, self._end)

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event


class Lap:
    """Time of one micro-batch; on a GPU it may still be running."""

    def __init__(self, begin: Any, end: Any) -> None:
        self._begin = begin
        self._end = end

    def seconds(self) -> float:
        """Waits for the device if it has to."""
        if isinstance(self._end, float):
            return self._end - float(self._begin)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000
