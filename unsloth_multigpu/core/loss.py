"""How a trainer's loss is scaled: what the step's gradient is made of decides how samples may be dealt."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from unsloth_multigpu.core.random_state import kept_random_state
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.logs import get_logger

logger = get_logger(__name__)

_KNOWN_AUTHORS = ("trl.", "unsloth", "Unsloth")
# Two counts so far apart that a part of the loss which is not divided by them shows, however small.
_FEW_ITEMS, _MANY_ITEMS = 64, 2**24
# Those of DPO's losses whose pairs do not meet each other.
_PAIRWISE_LOSSES = {"sigmoid", "hinge", "ipo", "robust", "sppo_hard", "apo_zero", "apo_down", "nca_pair"}
# Where TRL's trainers collect what they log.
_METRICS = ("_metrics", "_stored_metrics", "_total_train_tokens")
_MEANS = ("rows", "next tokens", "tokens")
WEIGHINGS = (*_MEANS, "sum")
# A preference term, which is a mean over rows, and one of likelihood, which is a mean over the chosen tokens.
_MIXED_TRAINERS = ("ORPOTrainer", "CPOTrainer")


@dataclass(frozen=True)
class LossScale:
    """How `compute_loss` of a trainer scales.

    Args:
        is_token_normalised: The loss is a sum divided by the step's `num_items_in_batch`, so a step's gradient does not
            depend on which micro-batch or rank a sample is in.
        is_multiplied: `compute_loss` multiplies by the number of ranks, against DDP's averaging.
        weighing: What a loss that is not token-normalised averages over, one of `WEIGHINGS`; "sum": nothing.
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

    Of TRL's and Unsloth's SFTTrainer it is known. A model of transformers may take loss arguments and still average its
    loss, and what a script wrote may do anything: these are tried on a few samples, without gradient.

    Args:
        trainer: A transformers Trainer.
        few_samples: Returns some samples, their first half and their second, each collated on the device.

    Raises:
        SetupError: The loss is neither a sum over the step's count nor a mean, or cannot be seen.
    """
    counts_items = bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)
    owner = _owner(trainer, "compute_loss")
    name = owner.__name__.removeprefix("_Unsloth") if owner.__module__.startswith(_KNOWN_AUTHORS) else ""
    # TRL marks some trainers by a text in the place of the function.
    is_own = callable(trainer.compute_loss_func) or trainer.label_smoother is not None
    if counts_items and name == "SFTTrainer" and not is_own:
        return _declared_scale(trainer)
    _warn_of_mixed_means(trainer, name)
    is_stock = owner.__module__.startswith("transformers.")
    plain = LossScale(
        is_token_normalised=False,
        is_multiplied=False,
        rows_are_independent=name == "DPOTrainer" and _has_pairwise_loss(trainer),
    )
    if not counts_items and name:
        return plain  # Means over rows, some of which count their calls.
    with kept_random_state(), _kept_metrics(trainer):
        samples = few_samples()
        if not samples:
            return _declared_scale(trainer) if counts_items else plain
        labels = samples[0].get("labels") if isinstance(samples[0], Mapping) else None
        if not isinstance(labels, torch.Tensor):
            # Without labels there is nothing to count, and the Trainer hands no count on.
            return plain
        trial = _Trial(trainer, samples)
        scale = trial.scale() if counts_items else plain
        if scale.is_token_normalised:
            return scale
        count = _FEW_ITEMS if counts_items else None
        return trial.weighed(scale, count, is_stock=is_stock and not callable(trainer.compute_loss_func))


def is_scripts_own(trainer: Any, method: str) -> bool:
    """True where the class that has the method is of the script: not of transformers, TRL or Unsloth."""
    return not _owner(trainer, method).__module__.startswith(("transformers.", *_KNOWN_AUTHORS))


def _owner(trainer: Any, method: str) -> Any:
    return next(cls for cls in type(trainer).__mro__ if method in vars(cls))


def few_samples(trainer: Any, loader: Any) -> list[Any]:
    """A few samples from the start of the data, all, their first half and their second, each collated on the device.

    An empty list for a stream that can be read only once.
    """
    rows = iter(loader.dataset)
    if rows is loader.dataset:
        return []
    few = list(islice(rows, max(2, min(8, trainer._train_batch_size))))
    middle = (len(few) + 1) // 2
    return [trainer._prepare_inputs(loader.collate_fn(part)) for part in (few, few[:middle], few[middle:]) if part]


def _warn_of_mixed_means(trainer: Any, name: str) -> None:
    loss_types = set(getattr(trainer.args, "loss_type", ())) if name == "DPOTrainer" else set()
    is_mixed = name in _MIXED_TRAINERS or (len(loss_types) > 1 and "sft" in loss_types)
    if is_mixed and trainer.args.gradient_accumulation_steps % trainer.accelerator.num_processes:
        logger.warning(
            "%s: its loss is partly a mean over tokens, so a micro-batch that ranks share counts a little differently; "
            "it is exact where gradient_accumulation_steps is a multiple of the number of ranks",
            name,
        )


def has_router_loss(trainer: Any) -> bool:
    """True where a mixture of experts adds a loss of its own for each micro-batch, whatever is in it."""
    config: Any = getattr(trainer.model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(config, "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False))


def _has_pairwise_loss(trainer: Any) -> bool:
    return set(trainer.args.loss_type) <= _PAIRWISE_LOSSES and not has_router_loss(trainer)


def _declared_scale(trainer: Any) -> LossScale:
    base = _base_model(trainer)
    loss_function = getattr(base, "loss_function", None)
    takes_count = loss_function is not None and "num_items_in_batch" in inspect.signature(loss_function).parameters
    return LossScale(takes_count or trainer.compute_loss_func is not None, is_multiplied=True)


def _base_model(trainer: Any) -> Any:
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _Trial:
    """Losses of a few samples, of their first half and of their second."""

    def __init__(self, trainer: Any, samples: list[Any]) -> None:
        self._trainer = trainer
        self._whole, *self._parts = samples

    def _loss(self, inputs: Any, num_items: int | None, *, over_ranks: bool = False) -> float:
        trainer, args = self._trainer, self._trainer.args
        before, args.average_tokens_across_devices = args.average_tokens_across_devices, over_ranks
        count = {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items, device=args.device)}
        try:
            # The same dropout masks each time.
            with (
                torch.no_grad(),
                trainer.compute_loss_context_manager(),
                trainer.accelerator.autocast(),
                _forked(args.device),
            ):
                return float(trainer.compute_loss(trainer.model, dict(inputs), **count))
        finally:
            args.average_tokens_across_devices = before

    def scale(self) -> LossScale:
        """Is it divided by the count, and multiplied by the number of ranks?"""
        few, many = (self._loss(self._whole, n) for n in (_FEW_ITEMS, _MANY_ITEMS))
        multiplied = self._loss(self._whole, _FEW_ITEMS, over_ranks=True)
        is_sum, is_mean = (math.isclose(many, x, rel_tol=0.01) for x in (few * _FEW_ITEMS / _MANY_ITEMS, few))
        if not math.isfinite(few) or is_sum == is_mean:
            raise SetupError(
                f"The loss of the first samples is {few:.4g} where {_FEW_ITEMS} tokens are said to be in the step, and "
                f"{many:.4g} where {_MANY_ITEMS} are: it is neither divided by them as a whole nor a mean, so ranks "
                "cannot be weighed.",
                hint="A part that is not divided, as a router's, goes with SFTTrainer; else use global_batch='scale'.",
            )
        is_multiplied = math.isclose(multiplied, few * self._trainer.accelerator.num_processes, rel_tol=0.01)
        return LossScale(is_token_normalised=is_sum, is_multiplied=is_multiplied)

    def weighed(self, scale: LossScale, count: int | None, *, is_stock: bool) -> LossScale:
        """What a mean is taken over, and whether rows may be exchanged between micro-batches."""
        model = self._trainer.model
        was_training = model.training
        samples = _told_apart(self._whole, *self._parts)
        model.eval()  # Without dropout, whose masks depend on the place in a micro-batch.
        try:
            whole, *means = (self._loss(inputs, count) for inputs in samples)
        finally:
            model.train(was_training)
        predicted = {w: _mean_of(means, [count_weights(part, w) for part in samples[1:]]) for w in _MEANS}
        # A loss that grows with the rows in another way, as their logarithm, is no sum.
        if math.isclose(sum(means), whole, rel_tol=0.02):
            predicted["sum"] = sum(means)
        # Sorted by what is likelier where some agree, as with rows of one length.
        weighing = min(predicted, key=lambda w: abs(predicted[w] - whole))
        return replace(
            scale, weighing=weighing, rows_are_independent=is_stock and self._rows_count_alone(whole, predicted)
        )

    def _rows_count_alone(self, whole: float, predicted: Mapping[str, float]) -> bool:
        """True only where the samples prove it: the mean over rows is met, and no other one could be meant."""
        base, labels = _base_model(self._trainer), self._whole["labels"]
        if not type(base).__module__.startswith("transformers.") or has_router_loss(self._trainer):
            return False
        if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in base.modules()):
            return False
        if not math.isclose(whole, predicted["rows"], rel_tol=1e-4):
            return False
        if labels.dim() < 2:
            # Weights of classes show only where there are several.
            return labels.is_floating_point() or len(set(labels.tolist())) > 1
        return not any(math.isclose(whole, predicted[w], rel_tol=1e-3) for w in _MEANS if w != "rows")


def _told_apart(whole: Any, *parts: Any) -> list[Any]:
    """Takes labels from the second half's rows where all halves have as many: nothing would show what is averaged."""
    labels, last = whole["labels"], parts[-1]["labels"]
    if labels.dim() < 2 or labels.is_floating_point() or len(parts) < 2 or labels.shape[1] != last.shape[1]:
        return [whole, *parts]
    if len({count_weights(part, "tokens") / len(part["labels"]) for part in parts}) > 1:
        return [whole, *parts]
    labels = torch.cat([labels[: -len(last)], _without_half(labels[-len(last) :])])
    return [{**whole, "labels": labels}, *parts[:-1], {**parts[-1], "labels": _without_half(last)}]


def _without_half(labels: torch.Tensor) -> torch.Tensor:
    """Rows that lose the first half of their labels: a prompt has none, and a row keeps one at least."""
    labelled = labels.ne(-100)
    return labels.masked_fill(labelled & (labelled.cumsum(1) <= labelled.sum(1, keepdim=True) // 2), -100)


def _mean_of(means: list[float], weights: list[int]) -> float:
    return sum(w * m for w, m in zip(weights, means, strict=True)) / max(1, sum(weights))


@contextmanager
def _kept_metrics(trainer: Any) -> Iterator[None]:
    """Keeps what a trainer collects for its log while its loss is tried."""
    kept = {name: copy.deepcopy(vars(trainer)[name]) for name in _METRICS if name in vars(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(kept)


def _forked(device: torch.device) -> Any:
    """Keeps torch's random state, on the CPU and on `device`."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def count_weights(inputs: Any, weighing: str) -> int:
    """Rows or labelled tokens of a micro-batch; tokens that are predicted from the one before lose the row's first."""
    labels = inputs["labels"]
    if weighing == "rows" or labels.dim() < 2:
        return len(labels)
    return int((labels[:, 1:] if weighing == "next tokens" else labels).ne(-100).sum())
