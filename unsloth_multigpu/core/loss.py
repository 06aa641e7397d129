"""How a trainer's loss is scaled: what the step's gradient is made of decides how samples may be dealt."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from unsloth_multigpu.errors import SetupError

_KNOWN_AUTHORS = ("trl.", "unsloth", "Unsloth")
_TRIED_NUM_ITEMS = 64
# Those of DPO's losses whose pairs do not meet each other.
_PAIRWISE_LOSSES = {"sigmoid", "hinge", "ipo", "robust", "sppo_hard", "apo_zero", "apo_down", "nca_pair"}
WEIGHINGS = ("rows", "next tokens", "tokens")


@dataclass(frozen=True)
class LossScale:
    """How `compute_loss` of a trainer scales.

    Args:
        is_token_normalised: The loss is a sum divided by the step's `num_items_in_batch`, so a step's gradient does not
            depend on which micro-batch or rank a sample is in.
        is_multiplied: `compute_loss` multiplies by the number of ranks, against DDP's averaging.
        weighing: What a loss that is not token-normalised averages over, one of `WEIGHINGS`.
        rows_are_independent: The loss is a mean over rows, each of which counts the same beside whatever others.
    """

    is_token_normalised: bool
    is_multiplied: bool
    weighing: str = "rows"
    rows_are_independent: bool = False

    def to_numbers(self) -> list[float]:
        """For sending; `from_numbers` reads it."""
        numbers = (self.is_token_normalised, self.is_multiplied, WEIGHINGS.index(self.weighing))
        return [float(number) for number in (*numbers, self.rows_are_independent)]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> LossScale:
        """The scale that `to_numbers` wrote."""
        return cls(bool(numbers[0]), bool(numbers[1]), WEIGHINGS[int(numbers[2])], bool(numbers[3]))


def find_loss_scale(trainer: Any, few_samples: Callable[[], list[Any]]) -> LossScale:
    """Finds out how the trainer's loss scales. Every rank must call it, with the same samples.

    Of TRL and Unsloth it is known. A model of transformers may take loss arguments and still average its loss, and what
    a script wrote may do anything: these are tried on a few samples, without gradient.

    Args:
        trainer: A transformers Trainer.
        few_samples: Returns some samples, their first half and their second, each collated on the device.

    Raises:
        SetupError: The loss is neither a sum over the step's count nor a mean, or cannot be seen.
    """
    counts_items = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
    owner = next(cls for cls in type(trainer).__mro__ if "compute_loss" in vars(cls))
    if not counts_items:
        scale = LossScale(is_token_normalised=False, is_multiplied=False)
        return replace(scale, rows_are_independent=_rows_are_independent(trainer, owner, few_samples))
    # TRL marks some trainers by a text in the place of the function.
    is_own = callable(trainer.compute_loss_func) or trainer.label_smoother is not None
    if owner.__module__.startswith(_KNOWN_AUTHORS) and not is_own:
        return _declared_scale(trainer)
    with kept_random_state():
        samples = few_samples()
        if not samples:
            return _declared_scale(trainer)
        if not isinstance(samples[0], Mapping) or "labels" not in samples[0]:
            # Without labels there is nothing to count, and the Trainer hands no count on.
            return LossScale(is_token_normalised=False, is_multiplied=False)
        scale = _try_loss(trainer, samples)
    if scale.is_token_normalised:
        return scale
    return replace(scale, rows_are_independent=_rows_are_independent(trainer, owner, few_samples))


def _declared_scale(trainer: Any) -> LossScale:
    model = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    loss_function = getattr(base, "loss_function", None)
    takes_count = loss_function is not None and "num_items_in_batch" in inspect.signature(loss_function).parameters
    return LossScale(takes_count or trainer.compute_loss_func is not None, is_multiplied=True)


def _try_loss(trainer: Any, samples: list[Any]) -> LossScale:
    args = trainer.args
    average = args.average_tokens_across_devices

    def loss_of(num_items: int, inputs: Any, *, over_ranks: bool = False) -> float:
        args.average_tokens_across_devices = over_ranks
        count = torch.tensor(num_items, device=args.device)
        # The same dropout masks each time.
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast(), _forked(args.device):
            return float(trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=count))

    try:
        with torch.no_grad():
            once, half = loss_of(_TRIED_NUM_ITEMS, samples[0]), loss_of(2 * _TRIED_NUM_ITEMS, samples[0])
            multiplied = loss_of(_TRIED_NUM_ITEMS, samples[0], over_ranks=True)
            parts = [loss_of(_TRIED_NUM_ITEMS, part) for part in samples[1:]]
    finally:
        args.average_tokens_across_devices = average
    is_sum, is_mean = (math.isclose(half, x, rel_tol=0.01) for x in (once / 2, once))
    if not math.isfinite(once) or is_sum == is_mean:
        raise SetupError(
            f"The loss of the first samples is {once:.4g}, and {half:.4g} where twice as many tokens are said to be in "
            "the step: it is neither divided by them as a whole nor a mean, so ranks cannot be weighed.",
            hint="A part that is not divided, as a router's, goes with SFTTrainer; else use global_batch='scale'.",
        )
    return LossScale(
        is_token_normalised=is_sum,
        is_multiplied=math.isclose(multiplied, once * trainer.accelerator.num_processes, rel_tol=0.01),
        weighing=_weighing(once, parts, samples[1:]),
    )


def _rows_are_independent(trainer: Any, owner: type, few_samples: Callable[[], list[Any]]) -> bool:
    """True where rows may be exchanged between micro-batches: of TRL by name, of a Trainer's own loss by trial."""
    if owner.__name__ == "DPOTrainer":
        return set(trainer.args.loss_type) <= _PAIRWISE_LOSSES
    model = trainer.model
    # A loss that a script wrote may count its calls.
    if not owner.__module__.startswith("transformers.") or callable(trainer.compute_loss_func):
        return False
    if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return False
    was_training = model.training
    model.eval()  # Without dropout, whose masks depend on the place in a micro-batch.
    try:
        with kept_random_state(), torch.no_grad(), trainer.compute_loss_context_manager():
            samples = few_samples()
            if len(samples) < 3 or not isinstance(samples[0], Mapping) or "labels" not in samples[0]:
                return False
            whole, *means = (float(trainer.compute_loss(model, dict(inputs))) for inputs in samples)
    finally:
        model.train(was_training)
    rows = [len(part["labels"]) for part in samples[1:]]
    if not math.isclose(whole, sum(r * m for r, m in zip(rows, means, strict=True)) / sum(rows), rel_tol=1e-3):
        return False
    # A mean over tokens looks the same where these rows happen to have as many labels each.
    labels = samples[0]["labels"]
    return bool(labels.dim() < 2 or len({int(n) for n in labels.ne(-100).sum(dim=-1).flatten()}) > 1)


def _forked(device: torch.device) -> Any:
    """Keeps torch's random state, on the CPU and on `device`."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Keeps what reading and collating a row may draw: the training must not miss it."""
    import numpy

    python, numpys, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)


def _weighing(whole: float, means: list[float], parts: list[Any]) -> str:
    """What the loss averages over: that by whose numbers the means of the halves give the mean of the whole."""

    def error(weighing: str) -> float:
        weights = [count_weights(part, weighing) for part in parts]
        return abs(sum(w * m for w, m in zip(weights, means, strict=True)) / max(1, sum(weights)) - whole)

    # Sorted by what is likelier where some agree, as with rows of one length.
    return min(WEIGHINGS, key=error)


def count_weights(inputs: Any, weighing: str) -> int:
    """Rows or labelled tokens of a micro-batch; tokens that are predicted from the one before lose the row's first."""
    labels = inputs["labels"]
    if weighing == "rows" or labels.dim() < 2:
        return len(labels)
    return int((labels[:, 1:] if weighing == "next tokens" else labels).ne(-100).sum())
