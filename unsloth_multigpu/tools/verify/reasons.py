"""Why may one process and several ranks differ although both are right?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.step.comparison import rounding_bound
from unsloth_multigpu.step.generation import draws_completions
from unsloth_multigpu.trainer_protocol import TrainerLike

# By which gradients of fp32 may differ.
FINE = 1e-5


@dataclass(frozen=True)
class Reason:
    """One reason for a difference that is no fault.

    Args:
        name: In a word or two.
        found: What was found, and why it matters.
        advice: What to do for a run that shows agreement.
    """

    name: str
    found: str
    advice: str


def find_reasons(trainer: TrainerLike, config: MultiGPUConfig) -> Iterator[Reason]:
    """Reasons that the options tell. The comparison of a step finds the others: what draws, and how the loss is shared.

    Args:
        trainer: A `transformers.Trainer` or subclass whose model is the one that is trained.
        config: The run's options.
    """
    if not config.keeps_global_batch:
        option = "global_batch='scale'" if config.global_batch == "scale" else "batch_size_per_gpu"
        found = f"{option}: a step of several ranks has more samples than one of one process"
        yield Reason("larger steps", found, f"leave {option} out")
    if not config.is_synchronous:
        found = f"strategy='{config.strategy}': ranks step by themselves, which is not what one process computes"
        yield Reason("local steps", found, "compare with strategy='ddp'")
    if draws_completions(trainer):
        found = f"{type(trainer).__name__} trains on texts that it generates by chance"
        yield Reason("sampling", found, "compare another trainer; generated texts are not repeatable over ranks")
    if (bound := rounding_bound(trainer)) > FINE:
        found = f"sums in another order round differently, gradients by up to {bound:.0e}; the bounds allow for it"
        yield Reason("precision", found, "train in fp32")
    if config.grad_compression is not None:
        found = f"grad_compression={config.grad_compression!r} rounds gradients"
        yield Reason("compression", found, "leave grad_compression out")
    if "8bit" in str(trainer.args.optim):
        yield Reason("8-bit optimizer", "it rounds its state; the bounds allow for it", "set optim='adamw_torch'")
    if trainer.args.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        yield Reason("kernels", "some kernels of the GPU add in an order that changes", "set full_determinism=True")
