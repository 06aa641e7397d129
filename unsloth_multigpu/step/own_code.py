"""Which code of a step the script wrote: what no table of ours can know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from unsloth_multigpu.seam import unsteered
from unsloth_multigpu.step.effect import is_library
from unsloth_multigpu.step.loss import is_of_script, is_scripts_own, name_of
from unsloth_multigpu.step.sampler import StepLoader
from unsloth_multigpu.trainer_protocol import TrainerLike


def own_code(trainer: TrainerLike, loader: StepLoader) -> list[str]:
    """The script's own code in a step, in words.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        loader: Of whole steps.
    """
    loss = unsteered(trainer.compute_loss)
    found = [f"{type(trainer).__name__}.training_step"] if is_scripts_own(trainer, "training_step") else []
    found += [name_of(trainer, loss)] if is_of_script(trainer, loss) else []
    collate, dataset = loader.dataset.collate, loader.one_process.dataset  # type: ignore[attr-defined]
    for what, part in (("collator", collate), ("data set", dataset)):
        named = part if hasattr(part, "__qualname__") else type(part)
        if not is_library(getattr(named, "__module__", None) or "builtins"):
            found.append(f"the {what} {named.__qualname__}")
    found += [f"a hook on {name}" for name in hooked(trainer.model)][:1]
    return found


def hooked(model: nn.Module) -> Iterator[str]:
    """Names of parameters with hooks of the script's own on their gradients. Those of libraries are known."""
    for name, parameter in model.named_parameters():
        later: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        hooks: Any = [*(parameter._backward_hooks or {}).values(), *later.values()]
        for hook in hooks:
            function = getattr(hook, "func", hook)  # Of a functools.partial.
            if not is_library(getattr(function, "__module__", None) or type(function).__module__):
                yield name
