"""Finds out which code of a training step the script defines. Its effect is not known in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from unsloth_multigpu.group.model import base_model
from unsloth_multigpu.group.shards import class_of
from unsloth_multigpu.library import is_library
from unsloth_multigpu.seam import unsteered
from unsloth_multigpu.trainer_protocol import TrainerLike

_STOCK_MODELS = ("transformers.", "unsloth", "Unsloth")
# Libraries whose trainers have known losses.
_KNOWN_AUTHORS = (*_STOCK_MODELS, "trl.")


def own_code(trainer: TrainerLike, loader: Any) -> list[str]:
    """Names the parts of a step that the script defines."""
    loss = unsteered(trainer.compute_loss)
    found = [f"{type(trainer).__name__}.training_step"] if has_own_step(trainer) else []
    found += [name_of(trainer, loss)] if is_of_script(trainer, loss) else []
    for what, part in (("collator", loader.dataset.collate), ("data set", loader.one_process.dataset)):
        named = part if hasattr(part, "__qualname__") else type(part)
        if not is_library(getattr(named, "__module__", None) or "builtins"):
            found.append(f"the {what} {named.__qualname__}")
    found += [f"a hook on {name}" for name in hooked(trainer.model)][:1]
    return found


def hooked(model: nn.Module) -> Iterator[str]:
    """Yields names of parameters with gradient hooks of the script. Hooks of libraries are left out."""
    for name, parameter in model.named_parameters():
        later: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        hooks: Any = [*(parameter._backward_hooks or {}).values(), *later.values()]
        for hook in hooks:
            function = getattr(hook, "func", hook)  # functools.partial
            if not is_library(getattr(function, "__module__", None) or type(function).__module__):
                yield name


def author_of(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> str:
    """Returns the class of transformers, TRL or Unsloth that defines the loss; "" if the script does."""
    owner = _owner_of(trainer, "compute_loss")
    is_method = getattr(compute_loss, "__self__", None) is trainer
    # Some TRL trainers have a text here instead of a function.
    if not is_method or callable(trainer.compute_loss_func) or not owner.__module__.startswith(_KNOWN_AUTHORS):
        return ""
    return owner.__name__.removeprefix("_Unsloth")


def is_of_script(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> bool:
    """True if the script defines the loss or the model that computes it, which may read the number of ranks."""
    model = class_of(base_model(trainer.model))
    return not author_of(trainer, compute_loss) or not model.__module__.startswith(_STOCK_MODELS)


def has_own_step(trainer: TrainerLike) -> bool:
    """True if `training_step` may compute the loss without `compute_loss`.

    The script overrides it, in a class or on the object, or a library's class does without `compute_loss`
    (`OnlineDPOTrainer`).
    """
    is_replaced = not _is_own(trainer, unsteered(trainer.training_step))
    owner = _owner_of(trainer, "training_step")
    is_known = owner.__module__.startswith(_KNOWN_AUTHORS) and issubclass(_owner_of(trainer, "compute_loss"), owner)
    return is_replaced or not is_known


def name_of(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> str:
    """Returns the name of the loss for messages."""
    if callable(trainer.compute_loss_func):
        return f"compute_loss_func={getattr(trainer.compute_loss_func, '__qualname__', trainer.compute_loss_func)}"
    if not _is_own(trainer, compute_loss):
        return f"compute_loss={getattr(compute_loss, '__qualname__', compute_loss)}"
    if isinstance(loss := getattr(trainer, "loss", None), nn.Module):  # sentence-transformers
        return f"the loss {type(loss).__name__}"
    owner = _owner_of(trainer, "compute_loss")
    if owner.__module__.startswith("transformers."):
        stepper = _owner_of(trainer, "training_step")
        if not stepper.__module__.startswith("transformers."):
            return f"the loss of {stepper.__name__}.training_step"
        return f"the loss of {class_of(base_model(trainer.model)).__name__}"
    return f"{owner.__name__}.compute_loss"


def _is_own(trainer: TrainerLike, method: Any) -> bool:
    return getattr(method, "__self__", None) is trainer


def _owner_of(trainer: TrainerLike, method: str) -> type:
    return next(cls for cls in type(trainer).__mro__ if method in vars(cls))
