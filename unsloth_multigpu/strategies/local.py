"""Strategies in which ranks step independently and synchronize rarely. They send less, and differ from DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.strategies.sync import GradientSync


class LocalSGDSync(GradientSync):
    """Each rank steps on its own gradients; every `every_steps` steps the trained weights are averaged.

    Only trainable weights and buffers are sent. Optimizer states stay with their ranks, and a checkpoint holds rank
    0's. Source: Stich 2019, "Local SGD Converges Fast and Communicates Little".

    Args:
        model: See `GradientSync`.
        optimizer: See `GradientSync`.
        every_steps: Optimizer steps between two synchronizations. An extra one in between restarts the count.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every_steps: int = 16) -> None:
        super().__init__(model, optimizer)
        self.every_steps = every_steps
        self._num_local_steps = 0

    @property
    def are_replicas_equal(self) -> bool:
        """False from the first step after a synchronization until the next one."""
        return self._num_local_steps == 0

    def after_step(self) -> None:
        """Synchronizes if `every_steps` steps are done. Collective in that case."""
        super().after_step()
        self._num_local_steps += 1
        if self._num_local_steps == self.every_steps:
            self.synchronize()

    def synchronize(self) -> None:
        """Makes weights and buffers of all ranks equal, if steps were made since the last time."""
        if self._num_local_steps:
            self._combine_weights()
            # In 64 bits the mean of equal numbers is exact, so constants do not change.
            self.average([b for b in self.buffers if b.is_floating_point()], dtype=torch.float64)
            self.broadcast([b for b in self.buffers if not b.is_floating_point()])
        self._num_local_steps = 0

    def _combine_weights(self) -> None:
        # A mean in 16 bits would lose most of the change of a few steps.
        for dtype in sorted({p.dtype for p in self.parameters}, key=str):
            same = [p for p in self.parameters if p.dtype == dtype]
            self.average(same, dtype=torch.promote_types(dtype, torch.float32))


class DiLoCoSync(LocalSGDSync):
    """Local steps, and an outer step where the ranks synchronize.

    The mean change of the weights since the last synchronization is the gradient of an outer SGD with Nesterov
    momentum, whose state is equal on all ranks. The weights of the last synchronization and the momentum are kept in 32
    bits: 8 bytes for each trainable parameter, 4 more during a synchronization. Source: Douillard et al. 2023, "DiLoCo:
    Distributed Low-Communication Training of Language Models".

    An earlier synchronization, for a save or an evaluation, is an outer step as well, in which the momentum moves the
    weights once more. So saves and evaluations should fall on multiples of `every_steps`.

    Args:
        model: See `GradientSync`.
        optimizer: See `GradientSync`.
        every_steps: See `LocalSGDSync`.
        learning_rate: Learning rate of the outer step. 1 without momentum = the mean of the ranks' weights.
        momentum: Momentum of the outer step; 0 = none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every_steps: int = 16,
        learning_rate: float = 0.7,
        momentum: float = 0.9,
    ) -> None:
        super().__init__(model, optimizer, every_steps)
        # In 32 bits also for 16-bit weights, since an outer step can be smaller than their spacing.
        self._start = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self.parameters]
        self._outer = torch.optim.SGD(self._start, lr=learning_rate, momentum=momentum, nesterov=momentum > 0)

    def begin(self) -> None:
        """Copies rank 0's weights and buffers to all ranks. The first window begins with them."""
        super().begin()
        self._read_start()

    def _read_start(self) -> None:
        with torch.no_grad():
            for start, parameter in zip(self._start, self.parameters, strict=True):
                start.copy_(parameter)

    def _combine_weights(self) -> None:
        with torch.no_grad():
            for start, parameter in zip(self._start, self.parameters, strict=True):
                # This rank began at the rounded value if weights have 16 bits.
                start.grad = start.to(parameter.dtype).to(start.dtype) - parameter
            self.average([s.grad for s in self._start if s.grad is not None])
            self._outer.step()
            self._outer.zero_grad()
            for start, parameter in zip(self._start, self.parameters, strict=True):
                parameter.copy_(start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the outer momentum: a tensor for each trainable parameter, none before the first synchronization.

        With 16-bit weights also the weights of the last synchronization in 32 bits.
        """
        buffers = [self._outer.state[s].get("momentum_buffer") for s in self._start]
        state: dict[str, Any] = {"momentum": [b.cpu() for b in buffers if b is not None]}
        if any(s.dtype != p.dtype for s, p in zip(self._start, self.parameters, strict=True)):
            state["start"] = [s.cpu() for s in self._start]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state_dict()` at the beginning of a window.

        Raises:
            SetupError: It belongs to another model.
        """
        self._read_start()
        shapes = [s.shape for s in self._start]
        for name in ("momentum", "start"):
            if state.get(name) and [t.shape for t in state[name]] != shapes:
                raise SetupError(
                    f"The checkpoint's {name} of strategy='diloco' does not fit this model's trainable parameters.",
                    hint="Resume with the model and the trainable parameters of the checkpoint.",
                )
        with torch.no_grad():
            for start, saved in zip(self._start, state.get("start", self._start), strict=True):
                start.copy_(saved)
        self._outer.state.clear()
        for start, saved in zip(self._start, state["momentum"], strict=bool(state["momentum"])):
            self._outer.state[start]["momentum_buffer"] = saved.to(start.device, copy=True)
