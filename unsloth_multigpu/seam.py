"""The table of instance seams: methods of a Trainer, its `Accelerator` and its callback handler.

A patch replaces a function of a class. An instance seam replaces a method of one object, during one training. Both are
verified when the training begins.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from unsloth_multigpu.errors import PatchError
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.versions import check_version

_MISSING: Any = object()
Owner = Literal["trainer", "accelerator", "callback_handler"]
# Libraries whose methods are checked for their parameters. Overrides in a script may have `**kwargs`.
_LIBRARIES = ("transformers", "accelerate", "trl", "peft", "unsloth", "unsloth_zoo", "UnslothTrainer")


@dataclass(frozen=True)
class InstanceSeam:
    """A method of one object that is replaced during a training.

    Attributes:
        owner: The object: the Trainer, or an attribute of it.
        name: Name of the method.
        reason: Why it is replaced, in one sentence, for docs/seams.md.
        needs: Parameters that our replacement relies on.
        called: When it must be called: "step" = in each optimizer step, "step end" = after each, "save" = for each
            checkpoint, "" = not in every training.
        optional: Not every version or Trainer has it.
    """

    owner: Owner
    name: str
    reason: str
    needs: tuple[str, ...] = ()
    called: Literal["step", "step end", "save", ""] = ""
    optional: bool = False


def _seam(target: str, reason: str, *needs: str, **more: Any) -> InstanceSeam:
    owner, _, name = target.rpartition(".")
    return InstanceSeam(owner or "trainer", name, reason, needs, **more)  # type: ignore[arg-type]


_WAITS = "Tells the watchdog that ranks generate completions, which takes longer than a step."
_PASSES = "Tells the watchdog that a reference model computes all samples before the first step."
_ALONE = "Gathers nothing in a loss: ranks have different samples there. Metrics are combined when they are logged."
_EVENT = ("args", "state", "control")

# A target without a dot is a method of the Trainer.
_TABLE = (
    _seam("get_train_dataloader", "Wraps the loader into one that yields whole optimizer steps."),
    _seam(
        "get_batch_samples",
        "Loads one step, counts its tokens over all ranks, and continues in the middle of an epoch.",
        *("epoch_iterator", "num_batches", "device"),
        called="step",
    ),
    _seam(
        "training_step",
        "Computes a rank's micro-batches. After the last one, gradients are synchronized and checked.",
        *("model", "inputs", "num_items_in_batch"),
        called="step",
    ),
    _seam(
        "compute_loss",
        "Scales the loss of a micro-batch by its share of the step, and records it for the error about a NaN.",
        *("model", "inputs", "num_items_in_batch"),
        called="step",
    ),
    _seam("get_total_train_batch_size", "Returns the number of samples of a step, printed at the start.", "args"),
    _seam(
        "_maybe_log_save_evaluate",
        "Combines the metrics of ranks before they are logged. All ranks log, save and evaluate in the same steps.",
        "tr_loss",
        called="step end",
    ),
    _seam("evaluation_loop", "Gives all ranks equal weights and buffers before an evaluation."),
    _seam("evaluate", "Gives rank 0's metrics to all ranks. Keeps the random state, in case the training stops here."),
    _seam("prediction_step", "Evaluates batches that have the samples of one process.", "model", "inputs"),
    _seam("_save_checkpoint", "Gives a checkpoint its name only when it is complete.", "model", "trial", called="save"),
    _seam("_get_output_dir", "Returns a temporary folder, in which a checkpoint is written first.", "trial"),
    _seam("_push_from_checkpoint", "Pushes a checkpoint only when it is complete.", "checkpoint_folder", optional=True),
    _seam("_load_rng_state", "Repeats, after a resume, an evaluation in which the training was stopped.", "checkpoint"),
    _seam("_issue_warnings_after_load", "Refuses a checkpoint that lacks trained weights.", "load_result"),
    _seam("save_model", "`chaos` injects a failure here.", "output_dir"),
    _seam("_prepare_inputs", "Divides completions among ranks and micro-batches by length."),
    _seam("_generate_and_score_completions", _WAITS, optional=True),
    _seam("generate_on_policy_outputs", _WAITS, optional=True),
    _seam("compute_ref_log_probs", _PASSES, optional=True),
    _seam("compute_reference_log_probs", _PASSES, optional=True),
    _seam("accelerator.gather", _ALONE, "tensor"),
    _seam("accelerator.gather_for_metrics", _ALONE, "input_data"),
    _seam("accelerator.reduce", _ALONE, "tensor", "reduction"),
    _seam("accelerator.pad_across_processes", "Pads nothing: batches are padded when they are combined.", "tensor"),
    _seam(
        "accelerator.clip_grad_norm_",
        "Finds an infinite or NaN gradient before the optimizer step.",
        *("parameters", "max_norm", "norm_type"),
        called="step",
    ),
    _seam("accelerator.backward", "Scales a loss that a script's own training_step computes.", "loss"),
    _seam("accelerator.prepare_model", "Creates DDP with our settings, or leaves the model without DDP.", "model"),
    _seam("accelerator.prepare_data_loader", "This package divides samples, not accelerate.", "data_loader"),
    _seam(
        "callback_handler.call_event",
        "Shows callbacks the script's gradient_accumulation_steps, rank 0's metrics and the ranks' figures, and "
        "measures their time.",
        "event",
        *_EVENT,
    ),
)
SEAMS: dict[str, InstanceSeam] = {seam.name: seam for seam in _TABLE}


class Steered(functools.partial):  # type: ignore[type-arg]
    """A replacement for a method. The method is its last bound argument. Counts its calls."""

    num_calls = 0
    is_needed = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return super().__call__(*args, **kwargs)

    @property
    def original(self) -> Any:
        """The replaced method."""
        return self.args[-1]


@contextmanager
def instance_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of one object within the context. Afterwards the object has its earlier one, or none."""
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
    """Replaces the method `SEAMS[name]` of `owner` within the context. `method` gets the original as first argument."""
    with instance_attribute(owner, name, Steered(method, getattr(owner, SEAMS[name].name))):
        yield


def unsteered(method: Any) -> Any:
    """Returns the method of the library or script that our replacements stand for."""
    return unsteered(method.original) if isinstance(method, Steered) else method


def verify_seams(trainer: TrainerLike) -> None:
    """Checks, when a training begins, that every method of the table exists with the parameters that we use.

    Raises:
        PatchError: One is missing, or has other parameters. Nothing was replaced yet.
    """
    for seam in SEAMS.values():
        check_seam(seam, type(owner_of(seam, trainer)))


def check_seam(seam: InstanceSeam, owner: type) -> bool:
    """Checks one method, in the class of its owner. Returns False if an optional method is absent.

    Raises:
        PatchError: It is missing, or has other parameters.
    """
    if not callable(getattr(owner, seam.name, None)):
        if seam.optional:
            return False
        raise _mismatch(seam, owner, "there is no such method")
    if missing := _missing_parameters(seam, owner):
        raise _mismatch(seam, owner, f"it has no parameter {', '.join(missing)}")
    return True


def verify_calls(trainer: TrainerLike, event: Literal["step", "step end", "save"]) -> None:
    """Checks, after the first step or a checkpoint, that our replacements were called.

    Raises:
        PatchError: The library, or an override in the script, does not call one of them.
    """
    for seam in SEAMS.values():
        owner = owner_of(seam, trainer)
        method = vars(owner).get(seam.name)
        if seam.called == event and _is_missed(method):
            what = f"it was not called {'for a checkpoint' if event == 'save' else 'in the first step'}"
            raise _mismatch(seam, type(owner), what)


def owner_of(seam: InstanceSeam, trainer: TrainerLike) -> Any:
    return trainer if seam.owner == "trainer" else getattr(trainer, seam.owner)


def _is_missed(method: Any) -> bool:
    if not isinstance(method, Steered):
        return False
    return (method.is_needed and not method.num_calls) or _is_missed(method.original)


def _missing_parameters(seam: InstanceSeam, owner: type) -> list[str]:
    """Returns the needed parameters that the library's own method lacks.

    Overrides in a script are not checked. A method with `*args` or `**kwargs` is assumed to pass them to its base.
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


def _mismatch(seam: InstanceSeam, owner: type, what: str) -> PatchError:
    modules = [base.__module__.partition(".")[0] for base in owner.__mro__]
    library = next((name for name in modules if name in _LIBRARIES), "transformers")
    row = check_version("unsloth" if library == "UnslothTrainer" else library)
    return PatchError(
        f"{owner.__name__}.{seam.name} ({row.name} {row.installed}): {what}. It is needed for this: {seam.reason}",
        hint=f"If your script overrides the method that calls it, call it there, too. Otherwise install a version "
        f"of {row.name} that docs/compatibility.md lists, and report this one.",
    )
