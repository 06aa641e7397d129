"""Probe: every function of another library that this package steers, and whether each patch lands."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import MultiGPUError, SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.patching import Patch, PatchRegistry
from unsloth_multigpu.seam import SEAMS, check_seam
from unsloth_multigpu.versions import SUPPORTED, check_version

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

# In the order of a user's script: Unsloth changes the others and asks to be imported first.
_LIBRARIES = ("unsloth", "transformers", "accelerate", "peft", "datasets", "trl")
# These import at once what they need on this machine. Their other modules are for other machines, and would patch the
# other libraries.
_EAGER = ("unsloth", "unsloth_zoo")
# Errors that imports of large libraries raise. A crash of the whole probe is reported by its parent.
_IMPORT_ERRORS = (
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    NameError,
    OSError,
    SyntaxError,
)


def all_patches() -> list[Patch]:
    """Every patch of a rank on a GPU, under `verify`, whatever this machine has; they are to land, not to be called."""
    from unsloth_multigpu.hooks.accelerate import device_patches, loop_patches
    from unsloth_multigpu.hooks.datasets import dataset_patches
    from unsloth_multigpu.hooks.saving import SaveGate, saving_patches
    from unsloth_multigpu.hooks.shard import shard_patches
    from unsloth_multigpu.hooks.trainer_patches import followed_train_patch, trainer_patches
    from unsloth_multigpu.hooks.unsloth_patches import offload_patches, placement_patches
    from unsloth_multigpu.notebook.kernel_share import notebook_patches

    return [
        followed_train_patch(lambda: False),
        *trainer_patches(MultiGPUConfig(), 2, "cuda", _not_in_a_run, _not_in_a_run),
        *device_patches("cuda", 1, 0),
        *loop_patches(MultiGPUConfig(), _not_in_a_run, ExitStack()),
        *placement_patches("cuda", 0, warns=False),
        *offload_patches(0),
        *saving_patches(SaveGate(0, _not_in_a_run)),
        *shard_patches(None, 0, 2),
        *dataset_patches(None, _not_in_a_run),
        *notebook_patches(_not_in_a_run),
    ]


def try_seams(patches: Sequence[Patch], libraries: Sequence[str] = _LIBRARIES) -> dict[str, Any]:
    """Applies the patches and imports what they aim at, as a user's script does.

    Args:
        patches: Each is also tried alone first, so that one that cannot be applied does not hide the others.
        libraries: Imported first, in this order, where they are installed.

    Returns:
        `imports` = library -> "" or its error; `seams` = one dictionary per patch with its `state`, `error` and
        `hint`; `verify` = "" or the error of the check before each training.
    """
    refused = {patch.target: error for patch in patches if (error := _refusal(partial(_apply_alone, patch)))}
    registry = PatchRegistry(patch for patch in patches if patch.target not in refused)
    registry.apply()
    imports = _import_all(name for name in libraries if check_version(name).installed is not None)
    waiting = [row.target.partition(":")[0] for row in registry.rows() if row.state == "waiting for import"]
    modules = _import_all(name for name in dict.fromkeys(waiting) if name.partition(".")[0] not in _EAGER)
    states = {row.target: row.state for row in registry.rows()}

    def describe(patch: Patch) -> dict[str, Any]:
        state = states.get(patch.target, "refused")
        in_import = modules.get(patch.target.partition(":")[0]) if state == "waiting for import" else None
        error = refused.get(patch.target) or in_import
        shown = {name: getattr(patch, name) for name in ("target", "supports", "reason", "optional")}
        return {**shown, "state": state, "is_misfit": isinstance(error, MultiGPUError), **_told(error)}

    return {
        "imports": {name: _told(error)["error"] for name, error in imports.items()},
        "seams": [describe(patch) for patch in patches],
        "verify": _told(_refusal(registry.verify))["error"],
    }


def try_instance_seams() -> list[dict[str, Any]]:
    """The methods that are steered on one object, as far as their classes show them; as `seams` of `try_seams`."""
    owners: dict[str, type] = {}
    with suppress(*_IMPORT_ERRORS):  # Told with the imports.
        from accelerate import Accelerator
        from transformers import PreTrainedModel, Trainer
        from transformers.trainer_callback import CallbackHandler

        owners = {"accelerator": Accelerator, "callback_handler": CallbackHandler}
        owners |= {"model": PreTrainedModel, "trainer": Trainer}
    found = []
    for seam in SEAMS.values() if owners else ():
        error: MultiGPUError | None = None
        state = "there"
        try:
            if not check_seam(seam, owners[seam.owner]):
                state = "other trainers have it"
        except MultiGPUError as misfit:
            state, error = "refused", misfit
        supports = SUPPORTED["accelerate" if seam.owner == "accelerator" else "transformers"]
        shown = {"target": seam.target, "supports": supports, "reason": seam.reason, "optional": seam.optional}
        found.append({**shown, "state": state, "is_misfit": error is not None, **_told(error)})
    return found


def _not_in_a_run(*args: Any) -> DDPManager:
    raise SetupError("A patch that was only tried out was called.", hint="Start a training with enable_multi_gpu().")


def _refusal(call: Callable[[], object]) -> MultiGPUError | None:
    try:
        call()
    except MultiGPUError as error:
        return error
    return None


def _apply_alone(patch: Patch) -> None:
    alone = PatchRegistry([patch])
    alone.apply()
    alone.undo()


def _import_all(modules: Iterable[str]) -> dict[str, BaseException | None]:
    errors: dict[str, BaseException | None] = {}
    for name in modules:
        try:
            importlib.import_module(name)
            errors[name] = None
        except _IMPORT_ERRORS as error:
            errors[name] = _root_of(error)
    return errors


def _root_of(error: BaseException) -> BaseException:
    """Our own error where it is behind another one: lazy packages turn what happens inside into an ImportError."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, MultiGPUError):
        link = link.__cause__ or link.__context__
    return link or error


def _told(error: BaseException | None) -> dict[str, str]:
    if error is None:
        return {"error": "", "hint": ""}
    if isinstance(error, MultiGPUError):
        return {"error": str(error.args[0]), "hint": error.hint}
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}", "hint": ""}


if __name__ == "__main__":
    from unsloth_multigpu.tools.probe import leave_outcome

    def _try_all() -> dict[str, Any]:
        found = try_seams(all_patches())
        return {**found, "seams": [*found["seams"], *try_instance_seams()]}

    leave_outcome(_try_all)
