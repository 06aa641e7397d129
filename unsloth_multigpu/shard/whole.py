"""Saves a sharded model as a whole one: its complete weights, and its own class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.group.shards import class_of, reshard, whole_of


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a sharded model with complete tensors on the CPU; empty on ranks above 0. Collective.

    For a model with adapters it has what PEFT may save with them, without the base.
    """
    import torch.distributed as dist

    reshard(model)
    # A model inside PEFT's has a PEFT config, too, but saves all weights.
    is_peft = "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)
    saves_adapters = is_peft or getattr(model, "_hf_peft_config_loaded", False)
    is_saved = _belongs_to_adapters(model) if saves_adapters else lambda name, tensor: True
    state: dict[str, Any] = {}
    # In the same order on all ranks. One tensor at a time is complete on the devices.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and is_saved(name, tensor):
            whole = whole_of(tensor.detach())
            if dist.get_rank() == 0:
                state[name] = whole.cpu()
    return tied_again(model, state)


def tied_again(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict with one tensor per weight, where a tied weight was gathered once for each name.

    Savers find tied names by that, and write the first one.
    """
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name in state:
            tied[name] = state[first.setdefault(id(tensor), name)]
    return {**state, **tied}


@contextmanager
def own_class(model: nn.Module) -> Iterator[None]:
    """Gives a model its class before `fully_shard` within the context: libraries identify models by its name."""
    engines = type(model)
    model.__class__ = class_of(model)
    try:
        yield
    finally:
        model.__class__ = engines


def _belongs_to_adapters(model: Any) -> Callable[[str, torch.Tensor], bool]:
    """Returns a function that is true for trainable weights, for all adapters and for the embeddings."""
    parts = {"modules_to_save", *model.peft_config}
    getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    ends = {id(getattr(getter(), "weight", None)) for getter in getters if getter is not None}

    def belongs(name: str, tensor: torch.Tensor) -> bool:
        is_of_adapter = "lora_" in name or not parts.isdisjoint(name.split("."))
        return tensor.requires_grad or is_of_adapter or id(tensor) in ends

    return belongs
