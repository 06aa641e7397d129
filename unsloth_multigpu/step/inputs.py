"""What a micro-batch is computed from, as one process has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.step.step import Step
from unsloth_multigpu.trainer_protocol import TrainerLike


def on_device(trainer: TrainerLike, inputs: Any) -> Any:
    """A collated micro-batch on the Trainer's device, as accelerate's loader yields it.

    `Trainer._prepare_inputs` is left to `training_step`: a script's own may do more, and is called once.
    """
    from accelerate.utils import send_to_device

    return send_to_device(inputs, trainer.args.device)


def take(trainer: TrainerLike, step: Step, given: Sequence[Any], batches: Sequence[Any]) -> None:
    """Takes the batches that `get_batch_samples` has returned: a script's own may have changed them.

    Args:
        trainer: Whose method it is.
        step: Its micro-batches get them.
        given: What the method has got for each: a filler without its labels.
        batches: What it has returned.

    Raises:
        SetupError: These are not as many.
    """
    if len(batches) != len(given):
        raise SetupError(
            f"{type(trainer).__name__}.get_batch_samples() returned {len(batches)} batches, and was given {len(given)}:"
            " what each counts in the step is not known then.",
            hint="Return one for each that it takes from epoch_iterator, or use global_batch='scale'.",
        )
    for micro_batch, before, batch in zip(step.micro_batches, given, batches, strict=True):
        labelled = micro_batch.inputs
        if batch is before:
            continue
        micro_batch.inputs = batch
        if before is not labelled and isinstance(batch, Mapping) and isinstance(before, Mapping):
            # A mean over no labels is not a number: a filler has them, and its share is zero.
            kept = {n: labelled[n] for n, v in before.items() if v is not labelled[n] and batch.get(n) is v}
            micro_batch.inputs = {**batch, **kept}


def free_rows(inputs: Sequence[Any]) -> None:
    """Takes back that a Trainer has marked the number of rows as one that stays.

    Unsloth marks it for the compiler when it counts a step's tokens; what is compiled and takes a mask or tokens would
    be compiled again for each number of rows. A weak mark goes before a static one.

    Args:
        inputs: What a model is called with, each a mapping of tensors.
    """
    for batch in inputs:
        for value in batch.values() if isinstance(batch, Mapping) else ():
            if 0 in getattr(value, "_dynamo_static_indices", ()):
                torch._dynamo.maybe_mark_dynamic(value, 0)
