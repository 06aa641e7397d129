"""4-bit weights in parts from the moment they are loaded: a rank keeps the rows that FSDP2 will give it, on the host.

transformers hands over one weight at a time. Its whole shape stays, for FSDP2 and PEFT; the rows of other ranks are
pages that nothing has written, which take no memory. FSDP2 then moves one layer at a time to the card, and keeps these
rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import is_sharded, part_of

# Of a `QuantState`: without these nothing computes. The others say what a weight is.
_VALUES = {"absmax", "code", "offset", "state2", "as_dict"}


class Withheld:
    """In the place of a `QuantState` until the model is sharded: without its values, nothing uses missing rows."""

    def __init__(self, state: Any) -> None:
        vars(self)["state"] = state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "state":  # Asked for by copies.
            raise AttributeError(name)
        if name not in _VALUES:
            return getattr(self.state, name)
        raise SetupError(
            "A rank has its part of the 4-bit weights only, and the model computes from train() on, where ranks gather "
            "each other's.",
            hint="Use the model after train() has begun. What needs whole 4-bit weights before it (generate(), a "
            "merge, adapters that start from the weights, a second 4-bit model) needs shard='off'.",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.state, name, value)


def keep_rows(weight: Any, storage: torch.dtype, device: torch.device, rank: int, num_ranks: int) -> Any:
    """Leaves a quantised weight this rank's rows, on the host.

    Args:
        weight: A `Params4bit`, whole, on any device. Changed.
        storage: Type that packed values lie in where theirs is an integer, which FSDP2 does not shard.
        device: The rank's own, where the constants of quantisation go.
        rank: This one.
        num_ranks: That share the model.

    Returns:
        The weight.
    """
    packed = weight.data
    if not packed.is_floating_point():
        packed = packed.reshape(-1).view(storage).reshape(-1, 1)
        weight.quant_storage = storage
    # Pages of its own, not what malloc has from earlier.
    pages = mmap.mmap(-1, packed.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    part = torch.frombuffer(pages, dtype=packed.dtype).view(packed.shape)
    rows = _rows(len(packed), rank, num_ranks)
    part[rows] = packed[rows].cpu()
    state = weight.quant_state
    state.to(device)
    weight.data = part
    weight.quant_state = weight.module.quant_state = Withheld(state)
    return weight


def _rows(num_rows: int, rank: int, num_ranks: int) -> slice:
    """Those that FSDP2 gives to a rank: as `torch.chunk` divides."""
    size = -(-num_rows // num_ranks)
    return slice(min(rank * size, num_rows), min((rank + 1) * size, num_rows))


def in_parts(model: nn.Module) -> list[Any]:
    """The layers whose weights were left to this rank's rows and are not sharded yet."""
    return [module for module in model.modules() if isinstance(vars(module).get("quant_state"), Withheld)]


def give_back(layers: Iterable[Any]) -> None:
    """Lets layers compute again, which are about to be sharded."""
    for layer in layers:
        layer.quant_state = layer.weight.quant_state = layer.quant_state.state


def check_parts(layers: Iterable[Any], rank: int, num_ranks: int) -> None:
    """Refuses to train with rows that this rank does not have.

    Args:
        layers: Of `in_parts`, after the model was sharded.
        rank: This one.
        num_ranks: That share the model.

    Raises:
        SetupError: An engine has not divided one as it was loaded, by rows over all ranks.
    """
    for layer in layers:
        rows = _rows(layer.weight.shape[0], rank, num_ranks)
        if not is_sharded(layer.weight) or len(part_of(layer.weight)) != rows.stop - rows.start:
            raise SetupError(
                "4-bit weights were loaded in parts for FSDP2 over all ranks, and were not sharded so.",
                hint="Leave ignored modules and a parallelism_config of your own out, or set shard='off'.",
            )


def on_device(values: Any, device: torch.device) -> Iterator[torch.Tensor]:
    """Tensors as transformers collects them, one or a list, on a device."""
    yield from (value.to(device) for value in (values if isinstance(values, list) else [values]))
