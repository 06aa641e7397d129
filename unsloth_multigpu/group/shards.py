"""Sharded tensors: the weights and gradients of a model that FSDP2 has sharded."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


# Of `FSDPState._lazy_init`, which has no class for it.
_ENTERED_BELOW = re.compile(r"FSDP (requires a single root module|state has already been lazily initialized)")


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
    """The class that a module had before `fully_shard` gave it one of its own, which has two bases more."""
    if "torch.distributed.fsdp" not in sys.modules:
        return type(module)
    from torch.distributed.fsdp import FSDPModule

    bases = type(module).__mro__
    return next(cls for cls in bases if issubclass(cls, nn.Module) and not issubclass(cls, FSDPModule))


def fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """The modules of a model that `torch.distributed.fsdp.fully_shard` was called on."""
    if "torch.distributed.fsdp" not in sys.modules:
        return iter(())
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, which shares its memory; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the complete tensor. Collective if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reshard(model: nn.Module) -> None:
    """Frees unsharded weights that a forward pass has left on some modules, so that `parameters()` are shards again.

    An optimizer that is made of the whole weights would train copies that nothing reads.
    """
    for module in fsdp_modules(model):
        module.reshard()


def named_as_before(model: nn.Module) -> None:
    """Gives sharded modules' classes the names of before: libraries know a model and its layers by these.

    For label smoothing the Trainer shifts labels where the name is that of a causal language model, and accelerate
    looks for layers by their name.
    """
    for module in fsdp_modules(model):
        own = class_of(module)
        type(module).__name__, type(module).__qualname__ = own.__name__, own.__qualname__


@contextmanager
def tried_pass(model: nn.Module) -> Iterator[None]:
    """Around a forward and backward pass that may raise: the model is left as it was, its weights in parts.

    FSDP2 of torch 2.13 and newer can be told that a pass has failed.
    """
    try:
        yield
    except Exception:
        for root in _roots(model):
            forget_pass(root)
        raise
    finally:
        reshard(model)


def forget_pass(root: Any) -> bool:
    """Brings an outermost module back to before a pass that was cut off; False where torch (before 2.13) cannot."""
    if not hasattr(root, "reset_iter_state"):
        return False
    # Of whole weights: FSDP2 uses them again, and would add the next gradient to theirs.
    for parameter in root.parameters():
        parameter.grad = None
    # torch reads there what a root gets in its first pass: one without a pass has nothing to reset.
    with suppress(AttributeError):
        root.reset_iter_state()
    return True


def is_entered_below(error: BaseException) -> bool:
    """True for what FSDP2 raises where a module in a sharded model is called before, or without, the model itself."""
    return isinstance(error, RuntimeError) and bool(_ENTERED_BELOW.search(str(error)))


def _roots(module: nn.Module) -> Iterator[Any]:
    """The outermost modules that `fully_shard` was called on."""
    if next(fsdp_modules(module), None) is module:
        yield module
        return
    for child in module.children():
        yield from _roots(child)


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of a sharded model with whole tensors, on rank 0's CPU; empty on other ranks. Collective.

    Tied weights stay one tensor. Of adapters, what PEFT may save with them: not the base.
    """
    import torch.distributed as dist

    reshard(model)
    is_saved = _belongs_to_adapters(model) if _saves_adapters(model) else lambda name, tensor: True
    is_first = dist.get_rank() == 0
    state: dict[str, Any] = {}
    wholes: dict[int, torch.Tensor] = {}
    # In the same order on all ranks. One tensor at a time is whole on them.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            state[name] = tensor
        elif is_saved(name, tensor) and id(tensor) not in wholes:
            whole = whole_of(tensor.detach())
            wholes[id(tensor)] = whole.cpu() if is_first else torch.empty(0)
        if id(tensor) in wholes:
            state[name] = wholes[id(tensor)]
    return state if is_first else {}


def tied_again(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict with one tensor for each weight, where an engine has gathered a shared one for each of its names.

    Savers find out by that which names belong together, and write the first.
    """
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and name in state:
            tied[name] = state[first.setdefault(id(tensor), name)]
    return {**state, **tied}


@contextmanager
def own_class(model: nn.Module) -> Iterator[None]:
    """Gives a model the class of before `fully_shard` for a time: libraries know models by its name."""
    engines = type(model)
    model.__class__ = class_of(model)
    try:
        yield
    finally:
        model.__class__ = engines


def _saves_adapters(model: nn.Module) -> bool:
    """A model inside of PEFT's has its configuration as well, and saves all weights."""
    is_peft = "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)
    return is_peft or bool(getattr(model, "_hf_peft_config_loaded", False))


def _belongs_to_adapters(model: Any) -> Callable[[str, torch.Tensor], bool]:
    """What is trained, every adapter, whether it is trained or not, and the embeddings."""
    parts = {"modules_to_save", *model.peft_config}
    getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    ends = {id(getattr(getter(), "weight", None)) for getter in getters if getter is not None}

    def belongs(name: str, tensor: torch.Tensor) -> bool:
        is_of_adapter = "lora_" in name or not parts.isdisjoint(name.split("."))
        return tensor.requires_grad or is_of_adapter or id(tensor) in ends

    return belongs
