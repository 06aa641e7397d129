"""Models that FSDP2 has sharded: the library that shards them, and their shards."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unsloth_multigpu.part import TrainerLike

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# Set by Unsloth on a model that it has sharded.
_OF_UNSLOTH = "_unsloth_fsdp2_native"
# Message of a RuntimeError of `FSDPState._lazy_init`.
_ENTERED_BELOW = re.compile(r"FSDP (requires a single root module|state has already been lazily initialized)")


class Engine(Enum):
    """The library that calls `torch.distributed.fsdp.fully_shard`."""

    UNSLOTH = "Unsloth"  # UNSLOTH_FSDP2, when the Trainer is made.
    ACCELERATE = "accelerate"  # TrainingArguments.fsdp, when the training begins.
    TRANSFORMERS = "transformers"  # DistributedConfig, when the model is loaded.


def find_engine(trainer: TrainerLike) -> Engine | None:
    """Returns the engine of the Trainer's model; None if the model is not sharded, or not by FSDP2 alone."""
    if trainer.is_fsdp_enabled:
        plugin = getattr(getattr(trainer.accelerator, "state", None), "fsdp_plugin", None)
        return Engine.ACCELERATE if getattr(plugin, "fsdp_version", 1) == 2 else None
    model = trainer.model
    if model is None or not has_shards(model) or next(fsdp_modules(model), None) is None:
        return None
    meshes = [getattr(p, "device_mesh", None) for p in model.parameters()]
    dimensions = {name for mesh in meshes if mesh is not None for name in mesh.mesh_dim_names or ()}
    if dimensions & {"tp", "cp", "pp", "ep", "sp"}:  # Another kind of parallelism divides the weights as well.
        return None
    return Engine.UNSLOTH if any(hasattr(m, _OF_UNSLOTH) for m in model.modules()) else Engine.TRANSFORMERS


def is_sharded(tensor: Any) -> TypeIs[DTensor]:
    """True if each rank holds a part of the tensor. False for a tensor that every rank holds completely."""
    placements = getattr(tensor, "placements", None)  # Of a DTensor.
    return placements is not None and not all(placement.is_replicate() for placement in placements)


def has_shards(model: nn.Module | None) -> bool:
    """True if a parameter of the model is sharded, even if a forward pass has left it unsharded for the moment."""
    if model is None:
        return False
    return any(is_sharded(p) for p in model.parameters()) or next(fsdp_modules(model), None) is not None


def class_of(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a module before `fully_shard`, which derives a class from it and `FSDPModule`."""
    if "torch.distributed.fsdp" not in sys.modules:
        return type(module)
    from torch.distributed.fsdp import FSDPModule

    bases = type(module).__mro__
    return next(cls for cls in bases if issubclass(cls, nn.Module) and not issubclass(cls, FSDPModule))


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """Returns an iterator over the modules of a model on which `fully_shard` was called."""
    if "torch.distributed.fsdp" not in sys.modules:
        return iter(())
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a tensor, without a copy; a tensor that is not a DTensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the complete tensor. Collective if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reshard(model: nn.Module) -> None:
    """Frees weights that a forward pass has left gathered on some modules, so that `parameters()` are shards again.

    An optimizer that is created from gathered weights would train copies that the model does not use.
    """
    for module in fsdp_modules(model):
        module.reshard()


@contextmanager
def tried_pass(model: nn.Module) -> Iterator[None]:
    """Surrounds a forward and backward pass that may raise an error. Afterwards the weights are sharded again."""
    try:
        yield
    except Exception:
        for root in _roots(model):
            forget_pass(root)
        raise
    finally:
        reshard(model)


def forget_pass(root: Any) -> bool:
    """Resets an outermost FSDP module after an interrupted pass. Returns False if torch (before 2.13) cannot."""
    if not hasattr(root, "reset_iter_state"):
        return False
    # FSDP2 reuses gathered weights, and would add the next gradient to theirs.
    for parameter in root.parameters():
        parameter.grad = None
    # A root gets the attribute that torch reads in its first pass. Before that there is nothing to reset.
    with suppress(AttributeError):
        root.reset_iter_state()
    return True


def is_entered_below(error: BaseException) -> bool:
    """True for the error of FSDP2 if a module of a sharded model is called before, or without, the model itself."""
    return isinstance(error, RuntimeError) and bool(_ENTERED_BELOW.search(str(error)))


def _roots(module: nn.Module) -> Iterator[Any]:
    """Yields the outermost modules on which `fully_shard` was called."""
    if next(fsdp_modules(module), None) is module:
        yield module
        return
    for child in module.children():
        yield from _roots(child)
