"""Loads 4-bit weights as shards: each rank keeps, in host memory, only the rows that FSDP2 will assign to it.

transformers loads one weight at a time. The weight keeps its complete shape, for FSDP2 and PEFT. The rows of other
ranks are pages that are never written, and take no memory. FSDP2 then moves one layer at a time to the GPU and keeps
this rank's rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import is_sharded, part_of

# Attributes of a `QuantState` that computations with the weight read. The others only describe the weight.
_VALUES = {"absmax", "code", "offset", "state2", "as_dict"}


class WithheldQuantState:
    """Replaces a `QuantState` until the model is sharded. Refuses computations, because the weight lacks rows."""

    def __init__(self, state: Any) -> None:
        vars(self)["state"] = state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "state":  # `copy` looks these up.
            raise AttributeError(name)
        if name not in _VALUES:
            return getattr(self.state, name)
        raise SetupError(
            "Each rank has loaded only a shard of the 4-bit weights. The model cannot be used before train(), in which "
            "the ranks gather them.",
            hint="Use the model after train() has begun. Before it, generate(), a merge, adapters that are initialized "
            "from the weights, or a second 4-bit model need the complete weights: set shard='off'.",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.state, name, value)


def keep_rows(weight: Any, storage: torch.dtype, device: torch.device, rank: int, num_ranks: int) -> Any:
    """Reduces a quantized weight to the rows of rank `rank`, in host memory. Returns the weight.

    Args:
        weight: A complete `Params4bit` on any device. Changed in place.
        storage: Floating-point dtype that replaces an integer dtype of the packed values, which FSDP2 does not shard.
        device: The rank's device, which gets the quantization constants.
    """
    packed = weight.data
    if not packed.is_floating_point():
        packed = packed.reshape(-1).view(storage).reshape(-1, 1)
        weight.quant_storage = storage
    # mmap returns new pages. Those of malloc may be resident already.
    pages = mmap.mmap(-1, packed.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    part = torch.frombuffer(pages, dtype=packed.dtype).view(packed.shape)
    rows = _rows(len(packed), rank, num_ranks)
    part[rows] = packed[rows].cpu()
    state = weight.quant_state
    state.to(device)
    weight.data = part
    weight.quant_state = weight.module.quant_state = WithheldQuantState(state)
    return weight


def _rows(num_rows: int, rank: int, num_ranks: int) -> slice:
    """Returns the rows that FSDP2 assigns to a rank: it divides them like `torch.chunk`."""
    size = -(-num_rows // num_ranks)
    return slice(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


def partial_layers(model: nn.Module) -> list[Any]:
    """Returns the layers whose weights have only this rank's rows, and are not sharded yet."""
    return [module for module in model.modules() if isinstance(vars(module).get("quant_state"), WithheldQuantState)]


def restore_states(layers: Iterable[Any]) -> None:
    """Restores the `QuantState` of layers that are about to be sharded."""
    for layer in layers:
        layer.quant_state = layer.weight.quant_state = layer.quant_state.state


def check_rows(layers: Iterable[Any], rank: int, num_ranks: int) -> None:
    """Checks that FSDP2 has assigned to this rank the rows that it has loaded.

    Raises:
        SetupError: A weight is not sharded by rows over all ranks.
    """
    for layer in layers:
        rows = _rows(layer.weight.shape[0], rank, num_ranks)
        if not is_sharded(layer.weight) or len(part_of(layer.weight)) != rows.stop - rows.start:
            raise SetupError(
                "Each rank has loaded its rows of the 4-bit weights, but FSDP2 has sharded them differently.",
                hint="Leave out ignored_modules and your own parallelism_config, or set shard='off'.",
            )
