"""Finds the layers that accelerate's FSDP2 shards as a group, and refuses models that it cannot shard.

accelerate (1.15, `fsdp2_prepare_model`) makes one group of each module whose class is in `_no_split_modules`, of the
input embeddings, of the last norm with the head, and of everything else. That fits decoders, with or without a vision
tower.
"""

from __future__ import annotations

from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import class_of


def layers_of(model: nn.Module) -> list[str]:
    """Returns those classes of `_no_split_modules` that the model has and that contain neither embeddings nor head."""
    ends = {id(module) for module in _ends_of(model)}
    modules = list(model.modules())
    present = {type(m).__name__ for m in modules}
    around_ends = {type(m).__name__ for m in modules for i in m.modules() if i is not m and id(i) in ends}
    names = getattr(model, "_no_split_modules", None) or ()
    return [name for name in names if name in present and name not in around_ends]


def check_shared(model: nn.Module) -> None:
    """Refuses a model in which two groups share a trainable weight: each would update a copy of its own.

    Raises:
        SetupError: Modules other than input embeddings and head share a weight.
    """
    ends = {id(module) for end in _ends_of(model) for module in end.modules()}
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(module) not in ends:
                users.setdefault(id(parameter), []).append(f"{path}.{name}".lstrip("."))
    tied = {id(parameter) for end in _ends_of(model) for parameter in end.parameters()}
    for key, names in users.items():
        if len(names) > 1 or key in tied:
            others = " and ".join(names[:2]) if len(names) > 1 else f"{names[0]} and the embeddings"
            raise SetupError(
                f"{class_of(model).__name__}: {others} share one weight, of which accelerate's FSDP2 would make two, "
                "because it shards them separately.",
                hint="Leave shard out: DDP trains this model.",
            )


def _ends_of(model: nn.Module) -> list[nn.Module]:
    """Returns the input embeddings and the head, if the model has them."""
    found = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, getter, lambda: None)())
        except NotImplementedError:  # Raised by many transformers models without token embeddings.
            continue
    return [module for module in found if isinstance(module, nn.Module)]
