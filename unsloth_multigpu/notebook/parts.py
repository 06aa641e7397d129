"""Moves sharded models to a new process group, or makes their use an error if shards are lost.

Imported inside functions only.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NoReturn

from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import class_of, forget_pass, fsdp_modules

CUT = "an error or a second Stop has interrupted its training, so the ranks' shards may be a step apart."
_ALONE = "the ranks with its other shards have ended."
_OLD_TORCH = "a cell was interrupted while its shards were gathered, and torch before 2.13 cannot undo that."
_OTHER_GROUP = "its shards belong to a process group that the script has made, and that is gone."


def rejoin() -> None:
    """Moves every sharded model of this process to the new process group, which has the name of the old one.

    Models that cannot be moved are lost.
    """
    for root in _roots():
        if not forget_pass(root):
            lose(root, _OLD_TORCH)
            continue
        try:
            for info in {id(info): info for info in _mesh_infos(root)}.values():
                # Weights look up their mesh's group by name in each use, FSDP2 only here.
                info.__post_init__()
        except RuntimeError:  # The script has made the groups of the mesh.
            lose(root, _OTHER_GROUP)


def lose_all() -> None:
    """Makes the use of any sharded model of this process an error, because the other ranks' shards are gone."""
    for root in _roots():
        lose(root, _ALONE)


def lose(model: nn.Module, why: str) -> None:
    """Makes computing or saving with a model an error. Both would fail without a reason, or use a part of it."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise SetupError(f"{class_of(model).__name__}: {why}", hint="Load the model or a checkpoint again.")

    module: Any
    for module in model.modules():
        module.register_forward_pre_hook(refuse, prepend=True)
        module.register_state_dict_pre_hook(refuse)
        if hasattr(module, "generate"):  # It may gather weights before it calls the module.
            module.generate = refuse


def _roots() -> list[Any]:
    """Returns the outermost `fully_shard` modules of this process, also those without a Trainer."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    found = [module for module in gc.get_objects() if issubclass(type(module), fsdp.FSDPModule)]
    below = {id(inner) for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if id(module) not in below]


def _mesh_infos(root: nn.Module) -> list[Any]:
    """Returns FSDP2's mesh infos of all modules below `root`."""
    states = [module._get_fsdp_state() for module in fsdp_modules(root)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    found = [getattr(o, name) for o in (*groups, *parameters) for name in ("mesh_info", "post_forward_mesh_info")]
    return [info for info in found if info is not None]
