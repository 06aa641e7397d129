"""Finds the objects inside wrappers: the model, its config; counts bytes of tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model, the model that it wraps, and so on."""
    yield model
    while (name := _inner_name(model)) is not None:
        model = getattr(model, name)
        yield model


def _inner_name(module: nn.Module) -> str | None:
    """Returns the name of a wrapper's attribute that holds the model; None for a module that is not a wrapper."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    # Importing the compiler takes a second. Without it, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return "_orig_mod" if compiler is not None and isinstance(module, compiler.OptimizedModule) else None


def base_model(model: Any) -> Any:
    """Returns the base model of a PEFT model; any other model unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_config(model: Any) -> Any:
    """Returns the config of the language model, also in a model with further towers; None without a config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def num_bytes(*tensors: torch.Tensor) -> int:
    """Returns the bytes of the elements of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def all_reduce_bytes(payload_bytes: int, world_size: int) -> int:
    """Returns the bytes that each rank sends in a ring all-reduce: 2 (n - 1) / n of the payload.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return 2 * (world_size - 1) * payload_bytes // world_size
