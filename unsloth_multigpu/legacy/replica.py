"""Replicas of one model in one process, for the legacy serial path.

Imported inside functions only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import SetupError

HINT = "Leave enable_ddp=False, the legacy path, out: DDP trains in one process per device."


def find_devices(first: torch.device, num_gpus: int | None) -> list[torch.device]:
    """Returns the devices for the replicas of a model on `first`.

    Without `num_gpus` these are all visible devices, or the CPU once.

    Raises:
        SetupError: Fewer devices are visible than `num_gpus`.
    """
    if first.type not in KINDS:
        return [first] * (num_gpus or 1)
    indices = range(torch.accelerator.device_count())
    devices = [first, *(torch.device(first.type, i) for i in indices if i != (first.index or 0))]
    if num_gpus is not None and num_gpus > len(devices):
        raise SetupError(
            f"num_gpus={num_gpus}, but {len(devices)} GPU(s) are visible.",
            hint=f"Set num_gpus={len(devices)}, or CUDA_VISIBLE_DEVICES.",
        )
    return devices[:num_gpus]


def copy_of(model: nn.Module, device: torch.device) -> nn.Module:
    """Returns a deep copy on `device`, with the same weights and settings.

    Raises:
        SetupError: Something in the model cannot be copied, or moved.
    """
    name = type(model).__name__
    copies: dict[int, Any] = {}  # By the id of the original.
    try:
        replica = copy.deepcopy(model, copies)
        replica = replica if device == next(model.parameters()).device else replica.to(device)
    # For example locks, handles, tensors with a graph, and quantized weights that cannot be moved.
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise SetupError(f"{name} cannot be copied to {device}: {error}", hint=HINT) from error
    for module in replica.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, (FunctionType, MethodType)):
                vars(module)[attribute] = _rebound(value, copies)
    pairs = list(zip(model.parameters(), replica.parameters(), strict=True))
    if any(mine is its or its.device != device or mine._backward_hooks for mine, its in pairs):
        raise SetupError(f"{name} cannot be copied to {device}: some weights are shared or have hooks.", hint=HINT)
    return replica


def _rebound(value: Any, copies: dict[int, Any]) -> Any:
    """Returns a function like `value` that refers to the copies instead of the originals.

    deepcopy() does not copy functions, so modules and methods in their closures remain the originals. TRL's SFTTrainer
    has the model's own `forward` in a closure.
    """
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(_rebound(value.__func__, copies), copies.get(id(value.__self__), value.__self__))
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    # A function may refer to itself.
    copies[id(value)] = value
    contents = [cell.cell_contents for cell in value.__closure__]
    found = [copies[id(one)] if id(one) in copies else _rebound(one, copies) for one in contents]
    cells = tuple(CellType(content) for content in found)
    function = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    function.__kwdefaults__ = value.__kwdefaults__
    vars(function).update(vars(value))
    return function


def take_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Returns the gradient of each parameter, in order, and removes it from the model."""
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def check_gradients(taken: Sequence[torch.Tensor | None], on_the_model: Sequence[nn.Parameter]) -> None:
    """Checks that the gradients of a shard are those of its replica, and not of the original model.

    Raises:
        SetupError: The replica has no gradient, or the original model has one.
    """
    if on_the_model or all(gradient is None for gradient in taken):
        raise SetupError(
            "A copy of the model computes nothing of its own: a function in it is bound to the model that it was "
            "copied from, or the loss is computed with another model.",
            hint=HINT,
        )
