"""Why may one process and several ranks differ although both are right? Looks for the reasons in a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.step.generation import draws_completions
from unsloth_multigpu.trainer_protocol import TrainerLike


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


def find_reasons(trainer: TrainerLike, config: MultiGPUConfig) -> list[Reason]:
    """Reasons for legitimate differences in this training.

    Args:
        trainer: A `transformers.Trainer` or subclass whose model is the one that is trained.
        config: The run's options.
    """
    return [
        *_other_samples(trainer, config),
        *_random_numbers(trainer),
        *_rows_that_meet(trainer),
        *_rounding(trainer, config),
    ]


def find_precision(trainer: TrainerLike) -> str:
    """The coarsest arithmetic of the training: "fp32", "tf32", "fp16" or "bf16"."""
    found = {trainer.accelerator.mixed_precision}
    for parameter in trainer.model.parameters():
        # Quantised weights are computed with in half precision.
        is_coarse = not parameter.is_floating_point() or parameter.dtype == torch.bfloat16
        found.add("bf16" if is_coarse else "fp16" if parameter.dtype == torch.float16 else "no")
    for precision in ("bf16", "fp8", "fp16"):
        if precision in found:
            return "bf16" if precision == "fp8" else precision
    return "tf32" if trainer.args.device.type == "cuda" and _multiplies_in_tf32() else "fp32"


def _multiplies_in_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    # torch 2.9 and newer have a setting for each kind of operation; once it was used, the older one raises.
    setting = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if setting is None else setting == "tf32"


def turn_dropout_off(model: nn.Module) -> None:
    """Sets every dropout probability of `model` to 0: of its modules, and numbers that functional dropout reads."""
    for owner, name, _ in _dropouts(model):
        setattr(owner, name, 0.0)


def _dropouts(model: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """(owner, attribute, probability) of each dropout that is on: LoRA's, a layer's, attention's."""
    for module in model.modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield module, "p", module.p
        # The models of transformers keep `attention_dropout` and the like as numbers, and read some from their config.
        for owner in (module, vars(module).get("config")):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float) and 0 < value <= 1:
                    yield owner, name, value


def _other_samples(trainer: TrainerLike, config: MultiGPUConfig) -> Iterator[Reason]:
    if not config.keeps_global_batch:
        option = "global_batch='scale'" if config.global_batch == "scale" else "batch_size_per_gpu"
        yield Reason(
            "larger steps",
            f"{option}: a step of several ranks has more samples than one of one process",
            f"leave {option} out",
        )
    if not config.meets_every_step:
        yield Reason(
            "local steps",
            f"sync='{config.sync}': ranks step by themselves, which is not what one process computes",
            "compare with sync='ddp'",
        )
    if draws_completions(trainer):
        yield Reason(
            "sampling",
            f"{type(trainer).__name__} trains on texts that it generates by chance",
            "compare another trainer; generated texts are not repeatable over ranks",
        )
    if getattr(trainer.data_collator, "mlm", False):
        yield Reason("masking", "the collator masks tokens by chance", "compare without masked language modelling")


def _random_numbers(trainer: TrainerLike) -> Iterator[Reason]:
    probabilities = {value for _, _, value in _dropouts(trainer.model)}
    if probabilities:
        shown = ", ".join(f"{p:g}" for p in sorted(probabilities))
        yield Reason("dropout", f"probabilities {shown}: ranks draw other masks than one process", "--no-dropout")
    if trainer.args.neftune_noise_alpha is not None:
        yield Reason("NEFTune", "noise is added to the embeddings", "set neftune_noise_alpha=None")


def _rows_that_meet(trainer: TrainerLike) -> Iterator[Reason]:
    model = trainer.model
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        yield Reason("batch norm", "each micro-batch is normalised by its own rows", "none: it is part of the model")
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        yield Reason("router loss", "it depends on which rows are in a micro-batch", "set output_router_logits=False")
    if any(cls.__name__ == "KTOTrainer" for cls in type(trainer).__mro__):
        yield Reason("KTO", "its estimate of KL is one of a micro-batch", "none: it is part of the loss")


def _rounding(trainer: TrainerLike, config: MultiGPUConfig) -> Iterator[Reason]:
    precision = find_precision(trainer)
    if precision != "fp32":
        yield Reason(precision, "sums in another order round differently; the bounds allow for it", "train in fp32")
    if config.grad_compression is not None:
        yield Reason(
            "compression",
            f"grad_compression={config.grad_compression!r} rounds gradients",
            "leave grad_compression out",
        )
    if "8bit" in str(trainer.args.optim):
        yield Reason("8-bit optimizer", "it rounds its state; the bounds allow for it", "set optim='adamw_torch'")
    if trainer.args.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        yield Reason("kernels", "some kernels of the GPU add in an order that changes", "set full_determinism=True")
