"""Which layers accelerate's FSDP2 makes a group of, and which models it cannot divide.

accelerate (1.15, `fsdp2_prepare_model`) makes a group of each module whose class `_no_split_modules` names, of the
input embeddings, of the last norm with the head, and of all that is left. That fits decoders, alone or behind a vision
tower.
"""

from __future__ import annotations

from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import class_of


def layers_of(model: nn.Module) -> list[str]:
    """Of `_no_split_modules`, the classes that the model has and that contain neither its embeddings nor its head."""
    ends = {id(module) for module in _ends_of(model)}
    modules = list(model.modules())
    present = {type(m).__name__ for m in modules}
    around_ends = {type(m).__name__ for m in modules for i in m.modules() if i is not m and id(i) in ends}
    names = getattr(model, "_no_split_modules", None) or ()
    return [name for name in names if name in present and name not in around_ends]


def check_shared(model: nn.Module) -> None:
    """Refuses a model of which two groups may use one trainable weight: after a step each would have its own.

    Raises:
        SetupError: Other modules than input embeddings and head share one.
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
                f"{class_of(model).__name__}: {others} are one weight, of which accelerate's FSDP2 would make two: it "
                "shards them apart.",
                hint="Leave shard out: DDP trains it.",
            )


def _ends_of(model: nn.Module) -> list[nn.Module]:
    """The input embeddings and the head, as far as the model has them."""
    found = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, getter, lambda: None)())
        except NotImplementedError:  # transformers asks each class, and many that read no tokens do not answer.
            continue
    return [module for module in found if isinstance(module, nn.Module)]
