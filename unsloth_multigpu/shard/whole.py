"""Lets a sharded model be saved like one that is not sharded: with complete weights, and under its own class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.group.shards import class_of, reshard, whole_of


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the full state dict of a sharded model, on the CPU of rank 0; empty on the other ranks. Collective.

    For a model with adapters it has only what PEFT may save with them, and not the base model.
    """
    import torch.distributed as dist

    reshard(model)
    # The model inside a PeftModel has a PEFT configuration, too, but saves all weights.
    is_peft = "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)
    saves_adapters = is_peft or getattr(model, "_hf_peft_config_loaded", False)
    is_saved = _belongs_to_adapters(model) if saves_adapters else lambda name, tensor: True
    state: dict[str, Any] = {}
    # All ranks gather in the same order, one tensor at a time, so that a device holds one complete tensor.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and is_saved(name, tensor):
            whole = whole_of(tensor.detach())
            if dist.get_rank() == 0:
                state[name] = whole.cpu()
    return with_tied_weights(model, state)


def with_tied_weights(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a gathered state dict in which all names of a tied weight have the same tensor.

    Each name was gathered as a tensor of its own. Savers recognize tied names by that, and write the first one.
    """
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name in state:
            tied[name] = state[first.setdefault(id(tensor), name)]
    return {**state, **tied}


@contextmanager
def original_class(model: nn.Module) -> Iterator[None]:
    """Within the context, a model has the class from before `fully_shard`, by whose name libraries identify models."""
    fsdp_class = type(model)
    model.__class__ = class_of(model)
    try:
        yield
    finally:
        model.__class__ = fsdp_class


def _belongs_to_adapters(model: Any) -> Callable[[str, torch.Tensor], bool]:
    """Returns a function that is true for trainable weights, adapters, embeddings and the head."""
    parts = {"modules_to_save", *model.peft_config}
    getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    ends = {id(getattr(getter(), "weight", None)) for getter in getters if getter is not None}

    def belongs(name: str, tensor: torch.Tensor) -> bool:
        is_of_adapter = "lora_" in name or not parts.isdisjoint(name.split("."))
        return tensor.requires_grad or is_of_adapter or id(tensor) in ends

    return belongs
