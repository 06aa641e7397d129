"""Adds FedProx's proximal term to the gradients of the user's own training loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unsloth_multigpu.errors import FederatedError


class ProximalPull:
    """Adds mu (w - w_global) to the gradient of each trainable parameter before each step of any optimizer.

    It is the gradient of mu/2 |w - w_global|^2 (Li et al. 2020, "Federated Optimization in Heterogeneous Networks"). It
    is added once per optimizer step, so gradients may be accumulated, and after clipping, which applies to the loss
    only. The parameters have the global weights now. mu = 0: no proximal term.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], mu: float) -> None:
        self._mu = mu
        self._start = {parameter: parameter.detach().clone() for parameter in parameters}
        self._depth = 0
        self.num_steps = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._mu:
                stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
                stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield
        if self._depth:
            raise FederatedError(
                "A step of an optimizer raised an error that train_fn caught: later steps had no proximal term.",
                hint="Let the error leave train_fn, or use another strategy than FedProx.",
            )

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A step may call that of its base class or of a wrapped optimizer.
        self._depth += 1
        if self._depth > 1:
            return
        if callable(kwargs.get("closure") or next(iter(args[1:]), None)):  # args[0] is the optimizer itself.
            # The closure computes the gradients inside the step, after this hook.
            raise FederatedError(
                f"proximal-mu does not work with {type(optimizer).__name__}.step(closure).",
                hint="Call step() without a closure, or use another strategy than FedProx.",
            )
        self._pull(optimizer)

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1

    @torch.no_grad()
    def _pull(self, optimizer: Optimizer) -> None:
        # A fused optimizer unscales gradients inside its step, by the scale that torch.amp.GradScaler sets.
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
