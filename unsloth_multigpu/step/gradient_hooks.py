"""Hooks of the script on gradients of parameters: do they give one process's gradient where ranks share a step?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.group.random_state import kept_random_state
from unsloth_multigpu.group.shards import is_sharded
from unsloth_multigpu.step.effect import is_library

# Powers of two, by which a linear hook's result changes without rounding; fp16 holds the smaller one.
_FACTOR, _FACTOR_FP16 = 2.0**20, 2.0**6


def misfit_of_hooks(model: nn.Module) -> str:
    """Names a hook that changes a gradient in a way that a part of the gradient, or a multiple of it, does not show.

    A hook sees the gradient of one micro-batch of this rank, multiplied by the number of ranks since DDP averages (not
    with a gradient scaler). What is linear, such as a mask, does not notice. Each hook is called a few times with
    made-up gradients, and generators are restored. Hooks that run once a gradient is accumulated may step an optimizer:
    they are not called.

    Args:
        model: Before it is wrapped.

    Returns:
        What it is, in words; "" = there is none.
    """
    for name, parameter, hook in hooks_of(model):
        if is_sharded(parameter):
            continue
        if hook is None:
            return f"a hook on {name} reads the accumulated gradient before the ranks' gradients meet"
        what = f"{_name_of(hook)}, a hook on the gradient of {name},"
        devices = [] if parameter.device.type == "cpu" else [parameter.device]
        kind = parameter.device.type if devices else "cuda"
        with kept_random_state(), torch.random.fork_rng(devices, device_type=kind), torch.no_grad():
            try:
                is_linear = _is_linear(hook, parameter)
            # It may read what a forward pass leaves.
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                return f"{what} could not be tried ({type(error).__name__}: {str(error)[:200]})"
        if not is_linear:
            return f"{what} is not linear"
    return ""


def hooks_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Callable[..., Any] | None]]:
    """The script's own hooks on gradients, with the parameter and its name.

    Args:
        model: Sharded or not.

    Returns:
        None stands for a hook that runs when a gradient is accumulated.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hooks: Any = parameter._backward_hooks or {}
            yield from ((name, parameter, hook) for hook in hooks.values() if _is_scripts_own(hook))
            later: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            yield from ((name, parameter, None) for hook in later.values() if _is_scripts_own(hook))


def _is_scripts_own(hook: Any) -> bool:
    # Those of libraries are known: masks, projections, signals of their engines, and trackers that only look.
    function = getattr(hook, "func", hook)  # Of a functools.partial.
    module = getattr(function, "__module__", None) or type(function).__module__
    return not is_library(module)


def _name_of(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__qualname__", type(hook).__name__))


def _is_linear(hook: Callable[..., Any], parameter: nn.Parameter) -> bool:
    # Seeded, so that all ranks find the same.
    generator = torch.Generator(parameter.device).manual_seed(0)
    first, second = (
        torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
        for _ in range(2)
    )
    factor = _FACTOR_FP16 if parameter.dtype == torch.float16 else _FACTOR

    def of(gradient: torch.Tensor) -> torch.Tensor:
        result = hook(gradient.clone())
        return gradient if result is None else result

    one = of(first)
    scaled = (of(first * factor) / factor, of(first / factor) * factor)
    return all(_is_close(one, other) for other in scaled) and _is_close(of(first + second), one + of(second))


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.numel():
        return True
    # A projection rounds the sum over a row.
    bound = torch.finfo(one.dtype).eps ** 0.75 * one.float().abs().max()
    return bool((one.float() - other.float()).abs().max() <= bound)
