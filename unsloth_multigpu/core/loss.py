"""How a trainer's loss is scaled: what the step's gradient is made of decides how samples may be dealt."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_multigpu.errors import SetupError

_KNOWN_AUTHORS = ("trl.", "unsloth", "Unsloth")
_TRIED_NUM_ITEMS = 64


@dataclass(frozen=True)
class LossScale:
    """How `compute_loss` of a trainer scales.

    Args:
        is_token_normalised: The loss is a sum divided by the step's `num_items_in_batch`, so a step's gradient does not
            depend on which micro-batch or rank a sample is in.
        is_multiplied: `compute_loss` multiplies by the number of ranks, against DDP's averaging.
        is_mean_over_labels: A loss that is not token-normalised averages over labelled tokens; otherwise over rows.
    """

    is_token_normalised: bool
    is_multiplied: bool
    is_mean_over_labels: bool = False


def find_loss_scale(trainer: Any, sample_inputs: Callable[[int, int], Any]) -> LossScale:
    """Finds out how the trainer's loss scales. Every rank must call it, with the same samples.

    Of TRL and Unsloth it is known. A model of transformers may take loss arguments and still average its loss, and what
    a script wrote may do anything: these are tried on a few samples, without gradient.

    Args:
        trainer: A transformers Trainer.
        sample_inputs: Returns samples `start` .. `stop` collated, on the device.
    """
    counts_items = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
    if not counts_items:
        return LossScale(is_token_normalised=False, is_multiplied=False)
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    if owner.__module__.startswith(_KNOWN_AUTHORS):
        return _declared_scale(trainer)
    return _try_loss(trainer, sample_inputs)


def _declared_scale(trainer: Any) -> LossScale:
    model = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    loss_function = getattr(base, "loss_function", None)
    takes_count = loss_function is not None and "num_items_in_batch" in inspect.signature(loss_function).parameters
    return LossScale(takes_count or trainer.compute_loss_func is not None, is_multiplied=True)


def _try_loss(trainer: Any, sample_inputs: Callable[[int, int], Any]) -> LossScale:
    args = trainer.args
    devices = [args.device] if args.device.type != "cpu" else []
    average = args.average_tokens_across_devices

    num_rows = max(2, min(8, trainer._train_batch_size))
    every, first, second = (0, num_rows), (0, num_rows // 2), (num_rows // 2, num_rows)

    def loss_of(num_items: int, rows: tuple[int, int] = every, *, over_ranks: bool = False) -> float:
        args.average_tokens_across_devices = over_ranks
        inputs = sample_inputs(*rows)
        count = torch.tensor(num_items, device=args.device)
        # The same dropout masks each time, and none taken from the training.
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast(), torch.random.fork_rng(devices):
            return float(trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count))

    try:
        with torch.no_grad():
            once, half = loss_of(_TRIED_NUM_ITEMS), loss_of(2 * _TRIED_NUM_ITEMS)
            multiplied = loss_of(_TRIED_NUM_ITEMS, over_ranks=True)
            parts = [loss_of(_TRIED_NUM_ITEMS, rows) for rows in (first, second)]
            num_labels = [_num_labels(sample_inputs(*rows)) for rows in (first, second)]
    finally:
        args.average_tokens_across_devices = average
    if not math.isfinite(once) or once == 0:
        raise SetupError(
            f"The loss of the first samples is {once}; how it scales with the number of ranks cannot be seen.",
            hint="Look at the first rows of the data set: do they have labels? Or use global_batch='scale'.",
        )
    return LossScale(
        is_token_normalised=math.isclose(half, once / 2, rel_tol=0.01),
        is_multiplied=math.isclose(multiplied, once * trainer.accelerator.num_processes, rel_tol=0.01),
        is_mean_over_labels=_is_mean_over_labels(once, parts, num_labels),
    )


def _is_mean_over_labels(whole: float, parts: list[float], num_labels: list[int]) -> bool:
    """Which of the two means of the halves gives the whole."""
    over_rows = sum(parts) / len(parts)
    over_labels = sum(n * p for n, p in zip(num_labels, parts, strict=True)) / max(1, sum(num_labels))
    return abs(over_labels - whole) < abs(over_rows - whole)


def _num_labels(inputs: Any) -> int:
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    return int((labels != -100).sum()) if isinstance(labels, torch.Tensor) and labels.dim() > 1 else 1
