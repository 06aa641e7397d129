"""What a training keeps between its steps, sent from rank 0 to the others: plain values as JSON, tensors bit by bit.

Imported inside functions only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsloth_multigpu.group.manager import DDPManager, local_device

_PLAIN = (bool, int, float, str, type(None))


def send_state(manager: DDPManager, mine: Any) -> tuple[Any, list[str]]:
    """Gives every rank rank 0's state. Collective.

    Tensors that a rank has in the same place, shape and type are written in place; others are made anew.

    Args:
        mine: This rank's state: dicts, lists, tuples, tensors, numbers and texts.

    Returns:
        Rank 0's state; and the type names of what can be no part of a message, in which each rank keeps its own.
    """
    sent: list[torch.Tensor] = []
    kept: list[str] = []
    if manager.identity.rank == 0:
        plain = _to_plain(mine, sent, kept)
        manager.broadcast_text(json.dumps([plain, kept]))
        manager.broadcast_tensors(sent)
        return mine, kept
    plain, kept = json.loads(manager.broadcast_text(""))
    state = _from_plain(plain, mine, sent, local_device(manager.identity, manager.config))
    manager.broadcast_tensors(sent)
    return state, kept


def _to_plain(value: Any, tensors: list[torch.Tensor], kept: list[str]) -> Any:
    """`[kind, ...]`, with the tensors put into `tensors` in their order."""
    if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        # Those of torchao, say: only its own class can make one.
        names, _ = value.__tensor_flatten__()
        return ["wrapper", [[name, _to_plain(getattr(value, name), tensors, kept)] for name in names]]
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]
    if isinstance(value, Mapping):
        return ["dict", [[key, _to_plain(item, tensors, kept)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_to_plain(item, tensors, kept) for item in value]]
    if isinstance(value, _PLAIN):
        return ["plain", value]
    kept.append(type(value).__name__)
    return ["kept"]


def _from_plain(plain: Any, mine: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    """Builds what `_to_plain` was given, of `mine` where it fits; `tensors` are to be filled, in this order."""
    kind, *rest = plain
    if kind == "wrapper":
        for name, part in rest[0]:
            _from_plain(part, getattr(mine, name, None), tensors, device)
        return mine
    if kind == "tensor":
        shape, dtype, place = rest
        fits = isinstance(mine, torch.Tensor) and list(mine.shape) == shape and str(mine.dtype) == f"torch.{dtype}"
        if not fits:
            mine = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if place == "cpu" else device)
        tensors.append(mine)
        return mine
    if kind == "dict":
        named = mine if isinstance(mine, Mapping) else {}
        return {key: _from_plain(item, named.get(key), tensors, device) for key, item in rest[0]}
    if kind == "plain":
        return rest[0]
    if kind == "kept":
        return mine
    own = list(mine) if isinstance(mine, (list, tuple)) else []
    items = [_from_plain(item, own[i] if i < len(own) else None, tensors, device) for i, item in enumerate(rest[0])]
    return tuple(items) if kind == "tuple" else items
