"""FedProx's pull towards the global weights, added to the gradients of whatever loop the user has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


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
        self._depth = 0
        self.num_steps = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._depth += 1
        if self._depth > 1:  # A step that calls its base class's step, or that of an optimizer which it wraps.
            return None
        closure = kwargs.get("closure") or next(iter(args[1:]), None)  # args[0] is the optimizer itself.
        if not callable(closure):
            self._pull(optimizer)
            return None
        # The gradients come to be inside the step, every time that it calls the closure.
        pulled = self._pulled(optimizer, closure)
        return (
            (args, {**kwargs, "closure": pulled}) if kwargs.get("closure") else ((args[0], pulled, *args[2:]), kwargs)
        )

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1

    def _pulled(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def with_pull() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._pull(optimizer)
            return loss

        return with_pull

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
