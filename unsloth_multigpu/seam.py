"""The methods of a Trainer, its accelerator and its callback handler that are steered while it trains, as one table.

A patch replaces a function of a class. An instance seam replaces a method of one object, while one training runs. Both
are verified when the training begins.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from unsloth_multigpu.errors import PatchError
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.versions import check_version

_MISSING: Any = object()
Owner = Literal["trainer", "accelerator", "callback_handler", "model"]
# Whose methods are checked for their parameters. A script may override them with `**kwargs`.
_LIBRARIES = ("transformers", "accelerate", "trl", "peft", "unsloth", "unsloth_zoo", "UnslothTrainer")


@dataclass(frozen=True)
class InstanceSeam:
    """A method of one object of another library that we steer.

    Attributes:
        owner: The object, as an attribute of the Trainer.
        name: Of the method.
        reason: Why it is steered, in one sentence, for docs/seams.md.
        needs: Parameters that our replacement relies on.
        called: "step" = in each optimizer step, "step end" = after each, "save" = for each checkpoint. A method that is
            not called then is an error. "" = called only in some trainings.
        unless_off: Argument of the training that turns the call off where it is zero or None.
        optional: Not every version, or not every trainer, has it.
    """

    owner: Owner
    name: str
    reason: str
    needs: tuple[str, ...] = ()
    called: Literal["step", "step end", "save", ""] = ""
    unless_off: str = ""
    optional: bool = False

    @property
    def target(self) -> str:
        """The name that is shown, such as `accelerator.reduce`."""
        return f"{self.owner}.{self.name}"


def _seam(target: str, reason: str, *needs: str, **more: Any) -> InstanceSeam:
    owner, _, name = target.rpartition(".")
    return InstanceSeam(owner or "trainer", name, reason, needs, **more)  # type: ignore[arg-type]


_WAITS = "Tells the watchdog that the ranks are making samples, which takes longer than a step."
_PASSES = "Tells the watchdog that a reference model passes over all rows before the first step."
_ALONE = "In the loss of a micro-batch each rank has rows of its own; metrics are put together when they are logged."
_EVENT = ("args", "state", "control")

# Of the Trainer where a target names no object.
_TABLE = (
    _seam("get_train_dataloader", "Its loader is turned into one of whole optimizer steps."),
    _seam(
        "get_batch_samples",
        "Takes one step of the loader, counts its tokens over all ranks, and continues in the middle of an epoch.",
        *("epoch_iterator", "num_batches", "device"),
        called="step",
    ),
    _seam(
        "training_step",
        "Computes a rank's micro-batches; gradients meet in the last one, and are judged and exchanged.",
        *("model", "inputs", "num_items_in_batch"),
        called="step",
    ),
    _seam(
        "compute_loss",
        "Weighs a micro-batch by its part of the step, and keeps its loss for the message about a nan.",
        *("model", "inputs", "num_items_in_batch"),
        called="step",
    ),
    _seam("get_total_train_batch_size", "The samples of a step, which the start of the training prints.", "args"),
    _seam(
        "_maybe_log_save_evaluate",
        "Ranks put their metrics together before a line is written, and act on one decision.",
        "tr_loss",
        called="step end",
    ),
    _seam("log", "A line that one rank writes by itself holds no part of the ranks' metrics.", "logs"),
    _seam("evaluation_loop", "Buffers are equal on all ranks before it begins."),
    _seam("evaluate", "All ranks act on rank 0's numbers, and what it draws leaves the training as it is."),
    _seam("prediction_step", "Each batch of an evaluation is one of one process.", "model", "inputs"),
    _seam("_save_checkpoint", "A checkpoint has its name only when it is complete.", "model", "trial", called="save"),
    _seam("_get_output_dir", "A checkpoint is first written into a hidden folder.", "trial"),
    _seam("_push_from_checkpoint", "A checkpoint is pushed when it is complete.", "checkpoint_folder", optional=True),
    _seam("_load_best_model", "Ranks that step by themselves synchronize before."),
    _seam("_issue_warnings_after_load", "A checkpoint without the trained weights is refused.", "load_result"),
    _seam("_load_optimizer_and_scheduler", "Tells a strategy which checkpoint to resume from.", "checkpoint"),
    _seam("save_model", "`chaos` fails here.", "output_dir"),
    _seam("_prepare_inputs", "Completions are dealt to ranks and micro-batches by length."),
    _seam("_generate_and_score_completions", _WAITS, optional=True),
    _seam("generate_on_policy_outputs", _WAITS, optional=True),
    _seam("compute_ref_log_probs", _PASSES, optional=True),
    _seam("compute_reference_log_probs", _PASSES, optional=True),
    _seam("accelerator.gather", _ALONE, "tensor"),
    _seam("accelerator.gather_for_metrics", _ALONE, "input_data"),
    _seam("accelerator.reduce", _ALONE, "tensor", "reduction"),
    _seam(
        "accelerator.pad_across_processes",
        "Batches of an evaluation have their own shapes until they are put together.",
        "tensor",
    ),
    _seam(
        "accelerator.clip_grad_norm_",
        "A step whose gradient is not finite is found, named and left out before it reaches the weights.",
        *("parameters", "max_norm", "norm_type"),
        called="step",
        unless_off="max_grad_norm",
    ),
    _seam("accelerator.backward", "Weighs what a script's own training_step computes without compute_loss.", "loss"),
    _seam("accelerator.prepare_model", "DDP is made with our settings, or not at all.", "model"),
    _seam("accelerator.prepare_data_loader", "Steps are dealt here, not by accelerate.", "data_loader"),
    _seam(
        "callback_handler.call_event",
        "Callbacks see the gradient_accumulation_steps of the script, and have a time of their own.",
        "event",
        *_EVENT,
    ),
    _seam("callback_handler.on_evaluate", "Callbacks of all ranks decide by rank 0's numbers.", *_EVENT, "metrics"),
)
SEAMS: dict[str, InstanceSeam] = {seam.name: seam for seam in _TABLE}


class Steered(functools.partial):  # type: ignore[type-arg]
    """Replaces a method of another library, which is its last argument, and counts its calls."""

    num_calls = 0
    is_needed = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return super().__call__(*args, **kwargs)

    @property
    def original(self) -> Any:
        """What stood there before."""
        return self.args[-1]


@contextmanager
def instance_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute on one object for a time, and puts back what the object itself had."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def steered(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of `owner` by `method` for a time. The original is the first argument of `method`.

    Args:
        owner: The Trainer, its accelerator or its callback handler.
        name: One of `SEAMS`.
        method: What is called in its place.
    """
    with instance_attribute(owner, name, Steered(method, getattr(owner, SEAMS[name].name))):
        yield


def unsteered(method: Any) -> Any:
    """The method of the library, or of the script, below all that stands in its place."""
    while isinstance(method, Steered):
        method = method.original
    return method


def verify_seams(trainer: TrainerLike) -> None:
    """Checks, when a training begins, that every method of the table is there and has the parameters that are used.

    Raises:
        PatchError: One is missing, or has another shape. Nothing was steered yet.
    """
    for seam in SEAMS.values():
        check_seam(seam, type(owner_of(seam, trainer)))


def check_seam(seam: InstanceSeam, owner: type) -> bool:
    """Checks one method of the class of its owner.

    Returns:
        False where an optional one is absent.

    Raises:
        PatchError: It is missing, or has another shape.
    """
    if not callable(getattr(owner, seam.name, None)):
        if seam.optional:
            return False
        raise _misfit(seam, owner, "there is no such method")
    if missing := _missing_parameters(seam, owner):
        raise _misfit(seam, owner, f"it has no parameter {', '.join(missing)}")
    return True


def verify_calls(trainer: TrainerLike, event: Literal["step", "step end", "save"]) -> None:
    """Checks, after the first step or a checkpoint, that our methods were called.

    Raises:
        PatchError: The library, or a method of the script, takes a path that does not call them.
    """
    for seam in SEAMS.values():
        owner = owner_of(seam, trainer)
        method = vars(owner).get(seam.name)
        if seam.called != event or not _is_missed(method):
            continue
        if not seam.unless_off or getattr(trainer.args, seam.unless_off):
            what = f"it was not called {'for a checkpoint' if event == 'save' else 'in the first step'}"
            raise _misfit(seam, type(owner), what)


def owner_of(seam: InstanceSeam, trainer: TrainerLike) -> Any:
    return trainer if seam.owner == "trainer" else getattr(trainer, seam.owner)


def _is_missed(method: Any) -> bool:
    """True if one of the replacements stacked on this method is needed and was not called."""
    while isinstance(method, Steered):
        if method.is_needed and not method.num_calls:
            return True
        method = method.original
    return False


def _missing_parameters(seam: InstanceSeam, owner: type) -> list[str]:
    """Parameters that the library's own method lacks.

    A method of the script that lacks one fails by itself. A method with `*args` or `**kwargs` passes them on.
    """
    for base in owner.__mro__:
        if seam.name not in vars(base) or base.__module__.partition(".")[0] not in _LIBRARIES:
            continue
        parameters = inspect.signature(vars(base)[seam.name]).parameters
        missing = [name for name in seam.needs if name not in parameters]
        if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
            return missing
        if not missing:
            return []
    return []


def _misfit(seam: InstanceSeam, owner: type, what: str) -> PatchError:
    modules = [base.__module__.partition(".")[0] for base in owner.__mro__]
    library = next((name for name in modules if name in _LIBRARIES), "transformers")
    row = check_version("unsloth" if library == "UnslothTrainer" else library)
    return PatchError(
        f"{owner.__name__}.{seam.name} ({row.name} {row.installed}): {what}. What stands on it: {seam.reason}",
        hint=f"If your script overrides what calls it, call it as {row.name} does. Else install a {row.name} that "
        "docs/compatibility.md names, and report this one.",
    )
