"""FedProx's pull towards the global weights, added to the gradients of whatever loop the user has."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unsloth_multigpu.errors import FederatedError


class ProximalPull:
    """Adds mu (w - w_global) to the gradient of each parameter before each step of any optimizer.

    The gradient of mu/2 |w - w_global|^2 (Li et al. 2020, "Federated Optimization in Heterogeneous Networks"). Once per
    optimizer step, so gradients may be accumulated; after clipping, which then sees the loss alone.

    Args:
        parameters: The trainable ones; they hold the global weights now.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], mu: float) -> None:
        self._mu = mu
        self._start = {parameter: parameter.detach().clone() for parameter in parameters}
        self._step: FrameType | None = None
        self.num_steps = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        hook = register_optimizer_step_pre_hook(self._before_step)
        try:
            yield
        finally:
            hook.remove()
            self._step = None  # It keeps what its callers had.

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A step may call its base class's, or that of an optimizer which it wraps. Counting steps that begin and end
        # would go wrong after one that raises; the stack does not.
        hook = inspect.currentframe()
        step = hook and hook.f_back
        if _is_within(step, self._step):
            return
        self._step = step
        if callable(kwargs.get("closure") or next(iter(args[1:]), None)):  # args[0] is the optimizer itself.
            # The gradients come to be inside the step, after this.
            raise FederatedError(
                f"proximal-mu cannot go with {type(optimizer).__name__}.step(closure).",
                hint="Call step() without a closure, or use another strategy than FedProx.",
            )
        self._pull(optimizer)

    @torch.no_grad()
    def _pull(self, optimizer: Optimizer) -> None:
        # A fused optimizer divides by the scale of mixed precision inside its step (torch.amp.GradScaler sets it).
        scale = getattr(optimizer, "grad_scale", None)
        own = [p for group in optimizer.param_groups for p in group["params"] if p in self._start]
        for parameter in own:
            pull = (parameter - self._start[parameter]).mul_(self._mu)
            if scale is not None:
                pull.mul_(scale)
            if parameter.grad is None:
                parameter.grad = pull
            else:
                parameter.grad.add_(pull)
        self.num_steps += bool(own)


def _is_within(frame: FrameType | None, outer: FrameType | None) -> bool:
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None
