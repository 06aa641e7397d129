"""How a trainer's loss is reduced over its rows, where that is known: it decides how a step is dealt."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.group.model import base_model, text_config
from unsloth_multigpu.group.shards import class_of
from unsloth_multigpu.seam import unsteered
from unsloth_multigpu.step.one_process import counted_as_one_process
from unsloth_multigpu.step.weighing import IGNORED, ROWS, SUM, TOKENS, weight_of
from unsloth_multigpu.trainer_protocol import OptionalArguments, TrainerLike

# The values of `loss_reduction`.
AUTO, TOKEN_SUM, ROW_MEAN, TOKEN_MEAN, WHOLE = "auto", "token_sum", "row_mean", "token_mean", "whole"
_WEIGHING = {TOKEN_SUM: SUM, ROW_MEAN: ROWS, TOKEN_MEAN: TOKENS, WHOLE: ROWS}

_KNOWN_AUTHORS = ("trl.", "unsloth", "Unsloth")
_STOCK_MODELS = ("transformers.", "unsloth", "Unsloth")
# The losses of DPO whose pairs are independent of each other.
_PAIRWISE_LOSSES = {"sigmoid", "hinge", "ipo", "robust", "sppo_hard", "apo_zero", "apo_down", "nca_pair"}
# Losses in which a row's weight depends on the others, though the first step cannot show it: policy and reference are
# equal there. By the class that computes them.
_HIDDEN_AT_FIRST = {
    "DPOTrainer": {"aot", "aot_unpaired"},
    "KTOTrainer": {"kto"},
    "BCOTrainer": {"bco"},
}


@dataclass(frozen=True)
class Inexact:
    """Why ranks cannot share a step exactly.

    Args:
        cause: In words.
        ways: What the user can do about it.
    """

    cause: str
    ways: str


@dataclass(frozen=True)
class LossReduction:
    """How the losses of parts of a micro-batch make up its own.

    Args:
        kind: A value of `loss_reduction`; "auto" = it is not known, and the first step measures it.
        weighing: What a part counts among its other parts, see `weighing.candidates`.
        rows_are_independent: A mean over rows in which the other rows do not change the weight of a row: rows may be
            exchanged between micro-batches.
        class_weights: Of the classes, where a mean is weighted by them.
        is_declared: It is known of this class, or the user has said it.
    """

    kind: str
    weighing: str = ROWS
    rows_are_independent: bool = False
    class_weights: tuple[float, ...] = ()
    is_declared: bool = True

    @property
    def is_token_normalised(self) -> bool:
        """The loss is a sum divided by the step's `num_items_in_batch`: any micro-batch or rank may have a sample."""
        return self.kind == TOKEN_SUM

    def to_text(self) -> str:
        """For sending; `from_text` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> LossReduction:
        """The reduction that `to_text` wrote."""
        values = json.loads(text)
        return cls(**{**values, "class_weights": tuple(values["class_weights"])})

    def weight(self, inputs: Any) -> float:
        """What a part of a micro-batch counts among its other parts."""
        return weight_of(inputs, self.weighing, self.class_weights)


def find_reduction(trainer: TrainerLike, compute_loss: Callable[..., Any], asked: str = AUTO) -> LossReduction:
    """How the trainer's loss is reduced, by what its class declares or the user says; kind "auto" where neither does.

    Nothing is called: the first step is compared with that of one process, which shows where this is wrong.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        compute_loss: Its bound `compute_loss`, without what this package puts around it.
        asked: The option `loss_reduction`.

    Raises:
        ConfigError: `loss_reduction="token_sum"` and the Trainer counts no tokens.
    """
    if asked == TOKEN_SUM and not _takes_count(trainer):
        raise ConfigError(
            f"loss_reduction='token_sum', but {name_of(trainer, compute_loss)} gets no num_items_in_batch from the "
            "Trainer.",
            hint="Leave loss_reduction out, or set it to 'row_mean' or 'token_mean'.",
        )
    if asked != AUTO:
        return LossReduction(asked, _WEIGHING[asked], rows_are_independent=asked == ROW_MEAN)
    if is_of_script(trainer, compute_loss) or is_scripts_own(trainer, "training_step"):
        return LossReduction(AUTO, is_declared=False)
    name = author_of(trainer, compute_loss)
    if trainer.label_smoother is None and not has_router_loss(trainer):
        if name in ("SFTTrainer", "Trainer") and _sums_tokens(trainer, name):
            return LossReduction(TOKEN_SUM, SUM)
        if name == "Trainer" and class_of(base_model(trainer.model)).__name__.endswith("ForSequenceClassification"):
            # Of labels, which a row may lack: then it does not count.
            return LossReduction(ROW_MEAN, TOKENS, rows_are_independent=not _has_unlabelled(trainer.train_dataset))
        if name == "DPOTrainer" and _loss_types(trainer) <= _PAIRWISE_LOSSES:
            return LossReduction(ROW_MEAN, rows_are_independent=True)
    return LossReduction(AUTO, is_declared=False)


def hidden_at_first(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> str:
    """Why the first step cannot show how a trainer's loss is reduced, in words; "" = it can."""
    hidden = _HIDDEN_AT_FIRST.get(author_of(trainer, compute_loss), set()) & _loss_types(trainer)
    if not hidden:
        return ""
    return f"loss_type={min(hidden)!r} weighs a row by the others once policy and reference differ"


def author_of(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> str:
    """Name of the class of transformers, TRL or Unsloth whose loss it is; "" = the script's own."""
    owner = owner_of(trainer, "compute_loss")
    is_method = getattr(compute_loss, "__self__", None) is trainer
    # TRL marks some trainers by a text instead of the function.
    if not is_method or callable(trainer.compute_loss_func) or not _is_known(owner):
        return ""
    return str(owner.__name__).removeprefix("_Unsloth")


def is_of_script(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> bool:
    """True where the script wrote the loss, or the model that computes it: it may read the number of ranks."""
    return not author_of(trainer, compute_loss) or not _has_stock_model(trainer)


def seen_alone(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> AbstractContextManager[None]:
    """While it is open, a loss that the script wrote sees rank 0 of one process."""
    return counted_as_one_process(trainer) if is_of_script(trainer, compute_loss) else nullcontext()


def name_of(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> str:
    """The name of the loss that a user knows."""
    model = trainer.model
    if callable(trainer.compute_loss_func):
        return f"compute_loss_func={getattr(trainer.compute_loss_func, '__qualname__', trainer.compute_loss_func)}"
    if getattr(compute_loss, "__self__", None) is not trainer:
        return f"compute_loss={getattr(compute_loss, '__qualname__', compute_loss)}"
    owner = owner_of(trainer, "compute_loss")
    if owner.__module__.startswith("transformers."):
        return f"the loss of {class_of(base_model(model)).__name__}"
    return f"{owner.__name__}.compute_loss"


def is_scripts_own(trainer: TrainerLike, method: str) -> bool:
    """True where the script wrote the method, in a class of its own or for the one object."""
    is_replaced = getattr(unsteered(getattr(trainer, method)), "__self__", None) is not trainer
    return is_replaced or not _is_known(owner_of(trainer, method))


def owner_of(trainer: TrainerLike, method: str) -> Any:
    """The class of the trainer that defines the method."""
    return next(cls for cls in type(trainer).__mro__ if method in vars(cls))


def _is_known(owner: Any) -> bool:
    return str(owner.__module__).startswith(("transformers.", *_KNOWN_AUTHORS))


def has_router_loss(trainer: TrainerLike) -> bool:
    """True where a mixture of experts adds a loss of its own for each micro-batch, whatever is in it."""
    config = text_config(trainer.model)
    return bool(getattr(config, "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False))


def _sums_tokens(trainer: TrainerLike, name: str) -> bool:
    """True where a language model's loss is the sum over labelled tokens divided by the step's count of them."""
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        return False
    model = base_model(trainer.model)
    if name == "Trainer" and not class_of(model).__name__.endswith("ForCausalLM"):
        return False
    loss_function = getattr(model, "loss_function", None)
    takes_count = loss_function is not None and "num_items_in_batch" in inspect.signature(loss_function).parameters
    return takes_count or trainer.compute_loss_func is not None


def _has_unlabelled(rows: Any) -> bool:
    """True where a column of labels can be read, and a row is left out of the mean: micro-batches keep their rows."""
    for name in ("label", "labels", "label_ids"):
        if name in (getattr(rows, "column_names", None) or ()) and hasattr(rows, "__getitem__"):
            return IGNORED in rows[name]
        if isinstance(rows, list) and rows and isinstance(rows[0], dict) and name in rows[0]:
            return any(isinstance(row, dict) and row.get(name) == IGNORED for row in rows)
    return False


def _has_stock_model(trainer: TrainerLike) -> bool:
    return class_of(base_model(trainer.model)).__module__.startswith(_STOCK_MODELS)


def _takes_count(trainer: TrainerLike) -> bool:
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _loss_types(trainer: TrainerLike) -> set[str]:
    """The loss types of a trainer of preferences."""
    types = cast(OptionalArguments, trainer.args).loss_type if hasattr(trainer.args, "loss_type") else ()
    return {types} if isinstance(types, str) else set(types or ())


def whole_ways(world_size: int) -> str:
    """What to set so that micro-batches need not be shared, in words."""
    return (
        f"Set gradient_accumulation_steps={world_size} or a multiple of it: each micro-batch is then computed whole by "
        "one rank, which is exact for any loss of a micro-batch."
    )
