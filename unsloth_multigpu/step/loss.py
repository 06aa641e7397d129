"""How a trainer's loss is scaled, which decides how the samples of a step may be dealt."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import base_model, text_config
from unsloth_multigpu.group.random_state import kept_random_state
from unsloth_multigpu.group.shards import class_of, is_entered_below
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.step.one_process import counted_as_one_process
from unsloth_multigpu.step.samples import COLLATOR_REMEMBERS, Sample
from unsloth_multigpu.step.trial import ZERO_LOSS, Fit, LossTrial
from unsloth_multigpu.step.weighing import ROWS, SUM, weight_of
from unsloth_multigpu.trainer_protocol import OptionalArguments, TrainerLike

logger = get_logger(__name__)

_KNOWN_AUTHORS = ("trl.", "unsloth", "Unsloth")
_STOCK_MODELS = ("transformers.", "unsloth", "Unsloth")
# Two counts that differ so much that any part of the loss which is not divided by them can be seen.
_FEW_ITEMS, _MANY_ITEMS = 64, 2**24
_LABELS_HINT = "Look at the rows of the data: each needs a label that is not -100."
# The losses of DPO whose pairs are independent of each other.
_PAIRWISE_LOSSES = {"sigmoid", "hinge", "ipo", "robust", "sppo_hard", "apo_zero", "apo_down", "nca_pair"}
# Losses that sort the rows of a micro-batch. While policy and reference are equal, a trial cannot see that.
_SORTING_LOSSES = {"aot", "aot_unpaired"}


@dataclass(frozen=True)
class Misfit:
    """Why parts of a micro-batch do not make up its loss, and by how much.

    Args:
        problem: In words.
        value: Relative misfit of the loss on a few rows; nan = not measured.
        gradient: The same of the gradient, as the norm of the difference by the norm.
        norm_ratio: Norm of the gradient that the parts make up by that of the whole.
        may_be_shared: Parts can at least be weighed; else only whole micro-batches can be dealt.
        hint: What to do where whole micro-batches are not exact either; "" = they are.
    """

    problem: str
    value: float = math.nan
    gradient: float = math.nan
    norm_ratio: float = 1.0
    may_be_shared: bool = True
    hint: str = ""

    def __str__(self) -> str:
        if math.isnan(self.value):
            return self.problem
        size = "its gradient differs" if not math.isfinite(self.gradient) else f"the gradient by {self.gradient:.2g}"
        norm = f", with {self.norm_ratio:.3g} times the norm" if math.isfinite(self.gradient) else ""
        return f"{self.problem}: on a few rows the loss is off by {self.value:.2g} and {size}{norm}"


@dataclass(frozen=True)
class Inexact:
    """Why ranks cannot share a step exactly.

    Args:
        cause: In words.
        ways: What the user can do about it.
    """

    cause: str
    ways: str


ROUTER = Misfit("the router's loss counts once for each micro-batch, whatever is in it")
SORTED = Misfit("its rows are sorted and compared with one another, so that the weight of a row depends on the others")
_STATE_HINT = "Let it depend on args and self.state, such as self.state.global_step, which all ranks have in common."
REMEMBERS = Misfit(
    "it depends on what the loss was called with before, and each rank has calls of its own", hint=_STATE_HINT
)
COUNTS_CALLS = Misfit(
    "it depends on how often the loss was called before, which is less on a rank with gradient_accumulation_steps > 1",
    hint=_STATE_HINT,
)
UNSEEN = Misfit("none of the rows that were read has a label, so that it cannot be tried")


@dataclass(frozen=True)
class LossScale:
    """How `compute_loss` of a trainer scales.

    Args:
        is_token_normalised: The loss is a sum divided by the step's `num_items_in_batch`, so a step's gradient does not
            depend on which micro-batch or rank a sample is in.
        weighing: What a loss that is not token-normalised averages over, see `weighing.candidates`; "sum": nothing.
        rows_are_independent: The loss is a mean over rows, in which the other rows do not change the weight of a row.
        class_weights: Of the classes, where the mean is weighted by them.
        misfit: Why a micro-batch has to stay whole; None = its parts make it up.
        is_watched: The loss may change its form, as a script's own or a preference loss may: it is tried again.
    """

    is_token_normalised: bool
    weighing: str = ROWS
    rows_are_independent: bool = False
    class_weights: tuple[float, ...] = ()
    misfit: Misfit | None = None
    is_watched: bool = False

    def to_text(self) -> str:
        """For sending; `from_text` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> LossScale:
        """The scale that `to_text` wrote."""
        values = json.loads(text)
        misfit = values.pop("misfit")
        return cls(
            **{**values, "class_weights": tuple(values["class_weights"])}, misfit=Misfit(**misfit) if misfit else None
        )

    def weight(self, inputs: Any) -> float:
        """What a part of a micro-batch counts among its other parts."""
        return weight_of(inputs, self.weighing, self.class_weights)


def find_loss_scale(
    trainer: TrainerLike,
    draw_samples: Callable[[], list[Sample]],
    compute_loss: Callable[..., Any] | None = None,
    *,
    with_gradient: bool = True,
) -> LossScale:
    """Finds out how the trainer's loss scales. Every rank must call it, with the same samples.

    Of TRL's and Unsloth's SFTTrainer with a known model it is known. Everything else may do anything, a model of
    transformers too, and is tried on a few rows. What does not fit has a `misfit`.

    Args:
        trainer: A transformers Trainer.
        draw_samples: Gives the samples of the trial, see `samples.draw_samples`.
        compute_loss: The trainer's bound `compute_loss`, without what this package puts around it; None = as it is.
        with_gradient: Gradients are compared as well. Hooks on the model see such a trial as a pass of the training.

    Raises:
        SetupError: The loss takes the step's count, and it cannot be seen whether it is divided by it.
    """
    compute_loss = compute_loss or trainer.compute_loss
    counts_items = _takes_count(trainer)
    name = author_of(trainer, compute_loss)
    is_own = is_of_script(trainer, compute_loss)
    # The form of a preference loss may be visible only once the policy differs from its reference.
    may_change = is_own or name not in ("SFTTrainer", "Trainer")
    if counts_items and name == "SFTTrainer" and not is_own and trainer.label_smoother is None:
        return replace(_declared_scale(trainer), misfit=ROUTER if has_router_loss(trainer) else None)
    plain = LossScale(is_token_normalised=False)
    with kept_random_state():
        samples = draw_samples()
    if not samples:
        if counts_items and is_own and trainer.accelerator.num_processes > 1:
            # Of a mean, and of a sum that is divided by the count, even whole micro-batches are weighed in two ways.
            raise SetupError(
                f"It cannot be seen how {name_of(trainer, compute_loss)} is averaged: {UNSEEN}.", hint=_LABELS_HINT
            )
        return replace(_declared_scale(trainer) if counts_items else plain, misfit=UNSEEN)
    trial = LossTrial(trainer, _through_the_model(trainer, compute_loss), is_own=is_own)
    scale, misfit, count = plain, None, _count_of(trainer, samples)
    if count is not None:
        scale, misfit = _scale_of_counted(trial, samples[0].whole)
    if trainer._train_batch_size > 1 and misfit is None:
        weighing = SUM if scale.is_token_normalised else ""
        fit = trial.fit(samples, count, weighing, with_gradient=with_gradient)
        misfit = Misfit(fit.problem, fit.value, fit.gradient, fit.norm_ratio) if fit.problem else None
        if misfit is None and name == "DPOTrainer" and not _SORTING_LOSSES.isdisjoint(_loss_types(trainer)):
            misfit = SORTED
        if not scale.is_token_normalised:
            is_alone = misfit is None and fit.weighing == ROWS and _counts_rows_alone(trainer, name, samples, fit)
            scale = replace(
                scale, weighing=fit.weighing, class_weights=fit.class_weights, rows_are_independent=is_alone
            )
    if any(sample.problem == COLLATOR_REMEMBERS for sample in samples):
        misfit = Misfit(COLLATOR_REMEMBERS, hint="Let the collator depend on its rows alone.")
    elif is_own and (misfit is None or misfit.may_be_shared):
        misfit = _misfit_of_state(trainer, trial, samples, count) or misfit
    if is_own:
        text = "loss: %s was called %d times on a few rows before the first step, to find how it is averaged"
        logger.info(text, name_of(trainer, compute_loss), trial.num_calls)
    return replace(scale, misfit=misfit, is_watched=may_change and misfit is None and trainer._train_batch_size > 1)


def _through_the_model(trainer: TrainerLike, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, refused where it calls parts of a sharded model by themselves: only the whole one gathers weights."""

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return compute_loss(*args, **kwargs)
        except RuntimeError as error:
            if not is_entered_below(error):
                raise
            raise SetupError(
                f"{name_of(trainer, compute_loss)} calls a part of the model by itself, and a sharded model gathers "
                "its weights when the model itself is called.",
                hint="Call the model that the loss is given, model(**inputs), and take what is needed from its output "
                "(output_hidden_states=True gives the states before the head); or leave shard out.",
            ) from error

    return called


def _misfit_of_state(
    trainer: TrainerLike, trial: LossTrial, samples: Sequence[Sample], count: int | None
) -> Misfit | None:
    """Finds whether an earlier call changes the loss: state that ranks do not share."""
    if len(samples) < 2:
        return None
    first, second = samples[0].whole, samples[1].whole
    fresh, one, other = (trial.value_after(before, second, count) for before in ((), (first,), (second,)))
    bound = max(trial.bound.value, 1e-4)
    if not math.isclose(one, other, rel_tol=bound):
        return REMEMBERS if all(map(math.isfinite, (fresh, one, other))) else None
    # In each step a rank calls it as often as one process with one micro-batch.
    counts = not math.isclose(fresh, one, rel_tol=bound) and trainer.args.gradient_accumulation_steps > 1
    return COUNTS_CALLS if counts else None


class LossWatch:
    """Tries a loss again during the training: its form may differ from that at the start.

    Before steps 2, 4, 8, ..., each time on other rows, without gradient: a few forward passes.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        compute_loss: See `find_loss_scale`.
        scale: What was found at the start.
        draw_samples: Returns samples of other rows for another number.
    """

    def __init__(
        self,
        trainer: TrainerLike,
        compute_loss: Callable[..., Any],
        scale: LossScale,
        draw_samples: Callable[[int], list[Sample]],
    ) -> None:
        self._trainer = trainer
        called = _through_the_model(trainer, compute_loss)
        self._trial = LossTrial(trainer, called, is_own=is_of_script(trainer, compute_loss))
        self._scale = scale
        self._draw_samples = draw_samples
        self._num_steps = 0

    def next_step(self) -> Misfit | None:
        """Called before each step. Returns what was found to be wrong."""
        self._num_steps += 1
        if self._num_steps < 2 or self._num_steps & (self._num_steps - 1):
            return None
        with kept_random_state():
            samples = self._draw_samples(self._num_steps)
        weighing = SUM if self._scale.is_token_normalised else self._scale.weighing
        fit = self._trial.fit(samples, _count_of(self._trainer, samples), weighing, with_gradient=False)
        has_changed = fit.is_certain or (math.isfinite(fit.value) and fit.value > self._trial.bound.value)
        return Misfit(fit.problem, fit.value) if has_changed else None


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
    """While it is open, a loss that the script wrote sees the number of processes of one process."""
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
    """True where the class that has the method is of the script: not of transformers, TRL or Unsloth."""
    return not _is_known(owner_of(trainer, method))


def owner_of(trainer: TrainerLike, method: str) -> Any:
    """The class of the trainer that defines the method."""
    return next(cls for cls in type(trainer).__mro__ if method in vars(cls))


def _is_known(owner: Any) -> bool:
    return str(owner.__module__).startswith(("transformers.", *_KNOWN_AUTHORS))


def has_router_loss(trainer: TrainerLike) -> bool:
    """True where a mixture of experts adds a loss of its own for each micro-batch, whatever is in it."""
    config = text_config(trainer.model)
    return bool(getattr(config, "output_router_logits", False) or getattr(trainer, "aux_loss_enabled", False))


def _declared_scale(trainer: TrainerLike) -> LossScale:
    loss_function = getattr(base_model(trainer.model), "loss_function", None)
    takes_count = loss_function is not None and "num_items_in_batch" in inspect.signature(loss_function).parameters
    return LossScale(takes_count or trainer.compute_loss_func is not None)


def _has_stock_model(trainer: TrainerLike) -> bool:
    return class_of(base_model(trainer.model)).__module__.startswith(_STOCK_MODELS)


def _takes_count(trainer: TrainerLike) -> bool:
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _count_of(trainer: TrainerLike, samples: Sequence[Sample]) -> int | None:
    """The count with which a loss is tried; None: without labels, the Trainer hands none on."""
    first = samples[0].whole if samples else None
    is_counted = isinstance(first, Mapping) and isinstance(first.get("labels"), torch.Tensor)
    return _FEW_ITEMS if is_counted and _takes_count(trainer) else None


def _scale_of_counted(trial: LossTrial, inputs: Any) -> tuple[LossScale, Misfit | None]:
    """Finds whether a loss that gets the step's count is divided by it."""
    few, many = (trial.value(inputs, n) for n in (_FEW_ITEMS, _MANY_ITEMS))
    if max(abs(few), abs(many)) < ZERO_LOSS:
        with trial.moved_weights():
            few, many = (trial.value(inputs, n) for n in (_FEW_ITEMS, _MANY_ITEMS))
    if not (math.isfinite(few) and math.isfinite(many)):
        raise SetupError(
            f"The loss of a few rows is {few:.4g}, so it cannot be seen how it is averaged.",
            hint=_LABELS_HINT,
        )
    bound = max(trial.bound.value, 1e-3)
    is_sum, is_mean = (math.isclose(many, x, rel_tol=bound) for x in (few * _FEW_ITEMS / _MANY_ITEMS, few))
    scale = LossScale(is_token_normalised=is_sum and not is_mean)
    if is_sum != is_mean:
        return scale, None
    problem = (
        f"it is {few:.4g} where {_FEW_ITEMS} tokens are said to be in the step, and {many:.4g} where {_MANY_ITEMS} "
        "are: neither divided by them as a whole nor a mean"
    )
    return scale, Misfit(problem, may_be_shared=False)


def _loss_types(trainer: TrainerLike) -> set[str]:
    """The loss types of a DPOTrainer."""
    return set(cast(OptionalArguments, trainer.args).loss_type)


def _counts_rows_alone(trainer: TrainerLike, name: str, samples: Sequence[Sample], fit: Fit) -> bool:
    """True only where it is known that no other mean than that over rows is meant: then rows may be exchanged."""
    if not _has_stock_model(trainer) or has_router_loss(trainer):
        return False
    if name == "DPOTrainer":
        return _loss_types(trainer) <= _PAIRWISE_LOSSES
    labels = samples[0].whole.get("labels") if isinstance(samples[0].whole, Mapping) else None
    if name != "Trainer" or not isinstance(labels, torch.Tensor):
        return False
    if labels.dim() < 2:
        # Weights of classes show only where there are several.
        return labels.is_floating_point() or len(set(labels.tolist())) > 1
    return not fit.is_one_of_several
