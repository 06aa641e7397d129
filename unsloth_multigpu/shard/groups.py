"""Prepares a model for accelerate's FSDP2: a weight belongs to one group of modules, which is gathered at once.

accelerate (1.15, `fsdp2_prepare_model`) makes a group of each module whose class `_no_split_modules` names, of the
input embeddings, of the last norm with the head, and of all that is left. That fits a decoder. Other models name a
class that they do not have, or one that contains the embeddings, have no input embeddings, or use a weight in two
groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import class_of
from unsloth_multigpu.seam import instance_attribute

_GETTERS = ("get_input_embeddings", "get_output_embeddings")


@contextmanager
def grouped(model: nn.Module, plugin: Any) -> Iterator[None]:
    """Tells accelerate how to divide the model, while the context is open: until the model is sharded.

    Args:
        model: About to be sharded.
        plugin: accelerate's `FullyShardedDataParallelPlugin`. Layers that the script has named stay.

    Raises:
        SetupError: Two groups would use a trainable weight: after a step each would have its own.
    """
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = layers_of(model)
    layers, ends = plugin.transformer_cls_names_to_wrap, ends_of(model)
    with ExitStack() as stack:
        for getter in _GETTERS:
            # With all that is left they are in one group. Encoders and decoders have copies of them there.
            if _has_no_answer(model, getter) or users_apart(model, layers, ends):
                stack.enter_context(instance_attribute(model, getter, lambda: None))
        for one, other in users_apart(model, layers, ends_of(model)):
            if model.get_parameter(one).requires_grad:
                raise SetupError(
                    f"{class_of(model).__name__}: {one} and {other} are one weight, of which accelerate's FSDP2 would "
                    "make two: it shards them apart.",
                    hint="Leave shard out: DDP trains it.",
                )
        yield


def _has_no_answer(model: nn.Module, getter: str) -> bool:
    """transformers asks each class for its embeddings, and many that read no tokens have not been told."""
    try:
        getattr(model, getter, lambda: None)()
    except NotImplementedError:
        return True
    return False


def ends_of(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The input embeddings and the head, of which accelerate makes groups; None where the model has none."""
    found = [None if _has_no_answer(model, g) else getattr(model, g, lambda: None)() for g in _GETTERS]
    inputs, outputs = (module if isinstance(module, nn.Module) else None for module in found)
    return inputs, outputs


def layers_of(model: nn.Module) -> list[str]:
    """Of `_no_split_modules`, the classes that the model has and that contain neither end of it."""
    ends = {id(module) for module in ends_of(model) if module is not None}
    modules = list(model.modules())
    present = {type(m).__name__ for m in modules}
    around_ends = {type(m).__name__ for m in modules for i in m.modules() if i is not m and id(i) in ends}
    names = getattr(model, "_no_split_modules", None) or ()
    return [name for name in names if name in present and name not in around_ends]


def users_apart(
    model: nn.Module, layers: list[str], ends: tuple[nn.Module | None, nn.Module | None]
) -> list[tuple[str, str]]:
    """Weights that several groups use, each by the names that two of them have for it.

    Args:
        model: Not sharded yet.
        layers: Names of the classes whose modules are groups.
        ends: Input embeddings and head. accelerate makes one group of both where they share a weight.
    """
    one, other = (getattr(end, "weight", None) for end in ends)
    groups = {id(ends[0]): "input", id(ends[1]): "input" if one is not None and one is other else "head"}
    modules = dict(model.named_modules(remove_duplicate=False))
    users: dict[int, dict[Any, str]] = {}
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False):
            group = _group_of(path, modules, groups, layers)
            users.setdefault(id(parameter), {}).setdefault(group, f"{path}.{name}".lstrip("."))
    pairs = (sorted(places.values())[:2] for places in users.values() if len(places) > 1)
    return [(first, second) for first, second in pairs]


def _group_of(path: str, modules: dict[str, nn.Module], groups: dict[int, str], layers: list[str]) -> Any:
    """The innermost module on the way to `path` that has a group; "" = all that is left."""
    while path:
        module = modules[path]
        if id(module) in groups:
            return groups[id(module)]
        if type(module).__name__ in layers:
            return id(module)
        path = path.rpartition(".")[0]
    return ""
