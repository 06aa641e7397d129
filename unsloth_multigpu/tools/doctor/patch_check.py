"""Probe: checks that every patch can be applied, and every replaced method exists."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict

from unsloth_multigpu.errors import MultiGPUError, SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.patching import Patch, PatchRegistry
from unsloth_multigpu.seam import SEAMS, check_seam
from unsloth_multigpu.tools.doctor.doctor_command import CheckRow
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.wire.event import EventWriter
from unsloth_multigpu.wire.identity import RankIdentity

# In the order of a user's script: Unsloth patches the others and has to be imported first.
_LIBRARIES = ("unsloth", "transformers", "accelerate", "peft", "datasets", "trl")
# These import all modules for this machine themselves. Their other modules are for other machines and patch libraries.
_EAGER = ("unsloth", "unsloth_zoo")


def all_patches() -> list[Patch]:
    """Returns every patch of a rank on a GPU under `verify`, whatever this machine has. They are never called."""
    import torch

    from unsloth_multigpu.hooks.saving import SaveGate
    from unsloth_multigpu.hooks.server_patches import GenerationServer
    from unsloth_multigpu.hooks.trainer_patches import TrainerHooks, followed_train_patch
    from unsloth_multigpu.notebook.kernel_share import notebook_patches
    from unsloth_multigpu.session import Session, patches_of_rank

    session = Session(MultiGPUConfig(shard="on"), RankIdentity(0, 0, 2, 2, "unsloth_multigpu"))
    events = EventWriter("", 0, 0, session.beat)
    session.server = GenerationServer(session.config, 0, events, is_first=True)
    return [
        followed_train_patch(lambda: False),
        *TrainerHooks(session).patches(),
        # A device index other than the rank needs more patches.
        *patches_of_rank(session, torch.device("cuda", 1), SaveGate(0, session.open_manager)),
        *notebook_patches(print),
    ]


def check_patches(patches: Sequence[Patch]) -> list[CheckRow]:
    """Applies the patches and imports their targets, as a rank of a user's script does.

    Returns a row for each library, and one for all patches. Raises the error of the first that cannot be applied.
    """
    registry = PatchRegistry(patches)
    registry.apply()
    imports = {name: _import(name) for name in _LIBRARIES if installed_version(name) is not None}
    required = {patch.target.partition(":")[0] for patch in patches if not patch.optional}
    waiting = [target.partition(":")[0] for target, state in registry.states().items() if state == "waiting for import"]
    for name in dict.fromkeys(waiting):
        if name.partition(".")[0] not in _EAGER and (error := _import(name)) and name in required:
            raise SetupError(f"{name}: {error}", hint="Fix this import.")
    registry.verify()
    hint = "Run `python -c 'import {}'`, and reinstall the library in its error."
    rows = [
        CheckRow("imports", name, "FAIL" if error else "ok", error or "imported", hint.format(name) if error else "")
        for name, error in imports.items()
    ]
    num_methods = 0 if imports["transformers"] else check_instance_seams()
    text = f"{len(patches)} functions and {num_methods} methods of other libraries are as tested"
    facts = {"num_patches": len(patches), "num_methods": num_methods}
    return [*rows, CheckRow("patches", "functions", "ok", text, facts=facts)]


def check_instance_seams() -> int:
    """Checks the instance seams by the classes of their owners. Returns their number.

    Raises PatchError for the first method that has other parameters.
    """
    from accelerate import Accelerator
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler

    owners = {"accelerator": Accelerator, "callback_handler": CallbackHandler, "trainer": Trainer}
    return sum(check_seam(seam, owners[seam.owner]) for seam in SEAMS.values())


def _import(name: str) -> str:
    """Imports a module and returns its error, "" = none. Raises an error of this package, also if it was wrapped."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  # From any code of a library.
        link: BaseException | None = error
        while link is not None and not isinstance(link, MultiGPUError):
            link = link.__cause__ or link.__context__
        if link is not None:
            raise link from None
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


if __name__ == "__main__":
    from unsloth_multigpu.tools.probe import leave_outcome

    leave_outcome(lambda: {"rows": list(map(asdict, check_patches(all_patches())))})
