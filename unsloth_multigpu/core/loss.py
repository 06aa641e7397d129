"""How a trainer's loss is scaled: what the step's gradient is made of decides how samples may be dealt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_KNOWN_AUTHORS = ("transformers.", "trl.", "unsloth", "Unsloth")


@dataclass(frozen=True)
class LossScale:
    """How `compute_loss` of a trainer scales.

    Args:
        is_token_normalised: The loss is a sum divided by the step's `num_items_in_batch`, so a step's gradient does not
            depend on which micro-batch or rank a sample is in.
        is_multiplied: `compute_loss` multiplies by the number of ranks, against DDP's averaging.
    """

    is_token_normalised: bool
    is_multiplied: bool


def find_loss_scale(trainer: Any, sample_inputs: Any) -> LossScale:
    """Finds out how the trainer's loss scales.

    Losses of transformers, TRL and Unsloth are known by what they declare. A `compute_loss` that the script wrote may
    do anything: it is tried on one sample, without gradient.

    Args:
        trainer: A transformers Trainer.
        sample_inputs: A function that returns the collated inputs of one sample.
    """
    counts_items = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
    if not counts_items:
        return LossScale(is_token_normalised=False, is_multiplied=False)
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    if owner.__module__.startswith(_KNOWN_AUTHORS):
        normalised = trainer.compute_loss_func is not None or _model_normalises(trainer.model)
        return LossScale(is_token_normalised=normalised, is_multiplied=True)
    return _try_loss(trainer, sample_inputs())


def _model_normalises(model: Any) -> bool:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    loss_function = getattr(base, "loss_function", None)
    return loss_function is not None and "num_items_in_batch" in inspect.signature(loss_function).parameters


def _try_loss(trainer: Any, inputs: Any) -> LossScale:
    devices = [trainer.args.device] if trainer.args.device.type != "cpu" else []
    average = trainer.args.average_tokens_across_devices

    def loss_of(num_items: int, *, over_ranks: bool) -> float:
        trainer.args.average_tokens_across_devices = over_ranks
        copy = dict(inputs) if isinstance(inputs, Mapping) else inputs
        num_items_in_batch = torch.tensor(num_items, device=trainer.args.device)
        # The same dropout masks each time, and none taken from the training.
        with trainer.compute_loss_context_manager(), torch.random.fork_rng(devices):
            loss = trainer.compute_loss(trainer.model, copy, num_items_in_batch=num_items_in_batch)
        return float(loss)

    try:
        with torch.no_grad():
            once, half = loss_of(64, over_ranks=False), loss_of(128, over_ranks=False)
            multiplied = loss_of(64, over_ranks=True)
    finally:
        trainer.args.average_tokens_across_devices = average
    return LossScale(
        is_token_normalised=abs(half - once / 2) < 0.01 * abs(once),
        is_multiplied=abs(multiplied - once * trainer.accelerator.num_processes) < 0.01 * abs(multiplied),
    )
