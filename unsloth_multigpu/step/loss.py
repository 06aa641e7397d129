"""Loss reductions: which code of a step is the script's, and the weight of a part of a micro-batch in the mean."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.group.model import base_model, text_config
from unsloth_multigpu.group.shards import class_of
from unsloth_multigpu.library import is_library
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.seam import instance_attribute, unsteered
from unsloth_multigpu.step.comparison import sum_dtype

# The values of `loss_reduction`.
AUTO, TOKEN_SUM, ROW_MEAN, TOKEN_MEAN, WHOLE = "auto", "token_sum", "row_mean", "token_mean", "whole"
# Not a value of the option: the mean over a rank's rows, each compared with the rows of all ranks.
GATHERED = "gathered"
IGNORED = -100
# What a loss averages over. With SUM, the losses of parts add up.
ROWS, SUM, TOKENS, CLASSES = "rows", "sum", "tokens", "class weights"
# Labels without the first of each row: a language model predicts a label from the token before.
NEXT = "next tokens"
_MEAN_OVER = {TOKEN_SUM: SUM, ROW_MEAN: ROWS, TOKEN_MEAN: TOKENS, WHOLE: ROWS}

# An attribute of sentence-transformers' losses that can compare rows of all ranks.
_GATHERS = "gather_across_devices"
# DPO losses in which pairs are independent of each other.
_PAIRWISE_LOSSES = {"sigmoid", "hinge", "ipo", "robust", "sppo_hard", "apo_zero", "apo_down", "nca_pair"}
_STOCK_MODELS = ("transformers.", "unsloth", "Unsloth")
# Libraries whose trainers have known losses.
_KNOWN_AUTHORS = (*_STOCK_MODELS, "trl.")


@dataclass(frozen=True)
class LossReduction:
    """How the loss of a micro-batch results from the losses of its parts.

    Args:
        kind: A value of `loss_reduction`, or "gathered"; "auto" = unknown, so the first step measures it.
        mean_over: What the weight of a part counts, see `possible_means`.
        class_weights: Class weights, for a mean that is weighted by them.
    """

    kind: str
    mean_over: str = ROWS
    class_weights: tuple[float, ...] = ()

    @property
    def is_token_normalized(self) -> bool:
        """The loss is a sum divided by the step's `num_items_in_batch`, so any rank may compute any sample."""
        return self.kind == TOKEN_SUM

    @property
    def rows_are_independent(self) -> bool:
        """The loss is a mean over rows that do not influence each other, so that micro-batches may exchange rows."""
        return self.kind == ROW_MEAN

    def count(self, inputs: Any) -> float:
        """Returns the weight of a part of a micro-batch; raises SetupError if the inputs lack what is counted."""
        found = count_of(inputs, self.mean_over, self.class_weights)
        if found is None:
            forms = ", ".join(f"{name} is {_form(value)}" for name, value in inputs.items())
            raise SetupError(
                f'The weight of a part of a micro-batch is given by "{self.mean_over}", which cannot be computed '
                f"for these inputs: {forms}.",
                hint="Let the collator give every micro-batch these columns, in the same form. Or let the loss be a "
                "sum divided by num_items_in_batch, or use global_batch='scale'.",
            )
        return found


def find_reduction(trainer: TrainerLike, asked: str = AUTO) -> LossReduction:
    """Returns the loss reduction of a trainer, by its class or by the option; kind "auto" if both leave it open.

    Nothing is computed. A wrong result shows in the comparison of the first step with one process.

    Raises:
        ConfigError: `loss_reduction="token_sum"` and the Trainer counts no tokens.
    """
    if asked == TOKEN_SUM and not _takes_count(trainer):
        raise ConfigError(
            f"loss_reduction='token_sum', but {name_of(trainer)} gets no num_items_in_batch from the Trainer.",
            hint="Leave loss_reduction out, or set it to 'row_mean' or 'token_mean'.",
        )
    if asked != AUTO:
        return LossReduction(asked, _MEAN_OVER[asked])
    if gathering_losses(trainer):
        return LossReduction(GATHERED)
    if _has_own_loss(trainer) or has_own_step(trainer):
        return LossReduction(AUTO)
    name = _owner_of(trainer, "compute_loss").__name__.removeprefix("_Unsloth")
    if trainer.label_smoother is None and not has_router_loss(trainer):
        if name in ("SFTTrainer", "Trainer") and _sums_tokens(trainer, name):
            return LossReduction(TOKEN_SUM, SUM)
        if name == "Trainer" and class_of(base_model(trainer.model)).__name__.endswith("ForSequenceClassification"):
            # The mean over labels: a row without a label has weight 0.
            return LossReduction(TOKEN_MEAN if _has_unlabelled(trainer.train_dataset) else ROW_MEAN, TOKENS)
        if name == "DPOTrainer" and _loss_types(trainer) <= _PAIRWISE_LOSSES:
            return LossReduction(ROW_MEAN)
    return LossReduction(AUTO)


def own_code(trainer: TrainerLike, loader: Any) -> list[str]:
    """Names the parts of a step that the script defines."""
    found = [f"{type(trainer).__name__}.training_step"] if has_own_step(trainer) else []
    found += [name_of(trainer)] if _has_own_loss(trainer) else []
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


def _has_own_loss(trainer: TrainerLike) -> bool:
    """True if the script defines the loss or the model that computes it."""
    # In some TRL trainers `compute_loss_func` is a string.
    is_own = callable(trainer.compute_loss_func) or not _is_of_library(trainer, "compute_loss")
    return is_own or not class_of(base_model(trainer.model)).__module__.startswith(_STOCK_MODELS)


def has_own_step(trainer: TrainerLike) -> bool:
    """True if `training_step` may compute the loss without `compute_loss`.

    That is so if the script overrides it, in a class or on the object, or if a library's class overrides it and not
    `compute_loss` (`OnlineDPOTrainer`).
    """
    step_of, loss_of = (_owner_of(trainer, name) for name in ("training_step", "compute_loss"))
    return not (_is_of_library(trainer, "training_step") and issubclass(loss_of, step_of))


def name_of(trainer: TrainerLike) -> str:
    """Returns the name of the loss for messages."""
    functions = {"compute_loss_func": trainer.compute_loss_func, "compute_loss": vars(trainer).get("compute_loss")}
    for name, function in functions.items():
        if callable(own := unsteered(function)) and getattr(own, "__self__", None) is not trainer:
            return f"{name}={getattr(own, '__qualname__', own)}"
    if isinstance(loss := getattr(trainer, "loss", None), nn.Module):  # sentence-transformers
        return f"the loss {type(loss).__name__}"
    owner = _owner_of(trainer, "compute_loss")
    if owner.__module__.startswith("transformers."):
        return f"the loss of {class_of(base_model(trainer.model)).__name__}"
    return f"{owner.__name__}.compute_loss"


def _is_of_library(trainer: TrainerLike, method: str) -> bool:
    """True if a class of transformers, TRL or Unsloth defines a method, and the script has not replaced it."""
    is_replaced = getattr(unsteered(getattr(trainer, method)), "__self__", None) is not trainer
    return not is_replaced and _owner_of(trainer, method).__module__.startswith(_KNOWN_AUTHORS)


def _owner_of(trainer: TrainerLike, method: str) -> type:
    return next(cls for cls in type(trainer).__mro__ if method in vars(cls))


def gathering_losses(trainer: TrainerLike) -> list[nn.Module]:
    """Returns the loss modules of sentence-transformers that can gather rows from all ranks; [] for other trainers.

    Such a loss compares each row of a micro-batch with all others. The loss of a part is different, because it lacks
    the other negatives. With `gather_across_devices` a rank compares its rows with those of all ranks, and the mean
    over ranks is the loss of the complete micro-batch.
    """
    loss = getattr(trainer, "loss", None)
    found = [each for each in (loss.values() if isinstance(loss, dict) else [loss]) if isinstance(each, nn.Module)]
    return [module for each in found for module in each.modules() if _GATHERS in vars(module)]


@contextmanager
def gathering(losses: Sequence[nn.Module], is_on: bool) -> Iterator[None]:
    """Sets whether losses gather the rows of all ranks, a collective in each forward and backward pass."""
    with ExitStack() as stack:
        for loss in losses:
            stack.enter_context(instance_attribute(loss, _GATHERS, is_on))
        yield


def has_router_loss(trainer: TrainerLike) -> bool:
    """True if a mixture of experts adds an auxiliary loss for each micro-batch."""
    config = text_config(trainer.model)
    return bool(getattr(config, "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False))


def _sums_tokens(trainer: TrainerLike, name: str) -> bool:
    """True if a language model's loss is the sum over labelled tokens, divided by their number in the step."""
    if not _takes_count(trainer):
        return False
    model = base_model(trainer.model)
    if name == "Trainer" and not class_of(model).__name__.endswith("ForCausalLM"):
        return False
    loss_function = getattr(model, "loss_function", None)
    takes_count = loss_function is not None and "num_items_in_batch" in inspect.signature(loss_function).parameters
    return takes_count or trainer.compute_loss_func is not None


def _has_unlabelled(rows: Any) -> bool:
    """True if the labels are readable and some row has none. Then micro-batches must keep their rows."""
    for name in ("label", "labels", "label_ids"):
        if name in (getattr(rows, "column_names", None) or ()) and hasattr(rows, "__getitem__"):
            return IGNORED in rows[name]
        if isinstance(rows, list) and rows and isinstance(rows[0], dict) and name in rows[0]:
            return any(isinstance(row, dict) and row.get(name) == IGNORED for row in rows)
    return False


def _takes_count(trainer: TrainerLike) -> bool:
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _loss_types(trainer: TrainerLike) -> set[str]:
    """Returns the loss types of a preference trainer."""
    # Trainers of other libraries, such as LLaMA-Factory's, have it as their own attribute only.
    types = getattr(trainer.args, "loss_type", None) or getattr(trainer, "loss_type", None)
    found = types if isinstance(types, (list, tuple)) else [types]
    return {name for name in found if isinstance(name, str)}


def whole_ways(world_size: int) -> str:
    """Returns a hint: what to set so that micro-batches are not split."""
    return (
        f"Set gradient_accumulation_steps={world_size} or a multiple of it, and divide per_device_train_batch_size by "
        "the same factor: a step keeps its samples, and each micro-batch, now smaller, is computed whole by one rank, "
        "which is exact for any loss."
    )


def count_of(inputs: Mapping[str, Any], mean_over: str, class_weights: Sequence[float] = ()) -> float | None:
    """Returns the weight of a part of a micro-batch: its number of rows, tokens, ...; None if the inputs lack it.

    `mean_over` is one of `possible_means`; `class_weights` are for a mean that is weighted by them.
    """
    return next((float(count()) for name, count in possible_means(inputs, class_weights) if name == mean_over), None)


def possible_means(
    inputs: Mapping[str, Any], class_weights: Sequence[float] = ()
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields what the loss of a collated micro-batch may average over, the most likely first, and what counts it.

    Class weights come first, because rows fit as well if all labels are of one class. The sum of an input, or that
    without its first column, may be a sum of weights.
    """
    labels: Any = inputs.get("labels")
    has_labels = isinstance(labels, torch.Tensor) and labels.dim() > 0
    is_index = has_labels and not labels.is_floating_point()
    if is_index:
        is_valid = labels.ne(IGNORED)
        valid = labels[is_valid]
        if class_weights and not bool(((valid < 0) | (valid >= len(class_weights))).any()):
            table = torch.tensor(class_weights, dtype=sum_dtype(labels.device), device=labels.device)
            yield CLASSES, table[valid].sum
        if labels.dim() >= 2:
            yield NEXT, is_valid[:, 1:].sum
        yield TOKENS, is_valid.sum  # With one label per row, models average over labels.
    rows = _num_rows(inputs)
    yield ROWS, lambda: rows
    yield SUM, lambda: 1
    if has_labels and not is_index:
        yield TOKENS, (labels.ne(IGNORED) if labels.dim() > 1 else torch.ones_like(labels)).sum
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.is_complex() or name in ("labels", "input_ids"):
            continue
        if value.dim() in (1, 2) and len(value) == rows:
            dtype = sum_dtype(value.device)
            yield f"sum of {name}", functools.partial(value.sum, dtype=dtype)
            if value.dim() == 2:
                yield f"sum after the first of {name}", functools.partial(value[:, 1:].sum, dtype=dtype)


def shared_means(batches: Sequence[Any], class_weights: Sequence[float], asked: str) -> list[str]:
    """Returns what the loss of each of these micro-batches and parts may average over, given `loss_reduction`."""
    names = [ROWS, SUM]
    if all(isinstance(batch, Mapping) for batch in batches):
        names = [name for name, _ in possible_means(batches[0], class_weights)]
        names = [name for name in names if all(count_of(b, name, class_weights) is not None for b in batches)]
    # Labels may be those of the next token.
    return [name for name in names if asked != TOKEN_MEAN or name in (TOKENS, NEXT)]


def _num_rows(inputs: Mapping[str, Any]) -> int:
    tensors = [inputs.get("labels"), *inputs.values()]
    return next((len(t) for t in tensors if isinstance(t, torch.Tensor) and t.dim()), 1)


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size = " x ".join(map(str, value.shape)) or "one number"
        return f"{size} of {str(value.dtype).removeprefix('torch.')}"
    return f"of type {type(value).__name__}"
