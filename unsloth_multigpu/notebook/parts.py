"""Models of which each rank holds a part, when the process group ends: they go on in the new one, or say what is lost.

Imported inside functions only.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NoReturn

from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.shards import class_of, forget_pass, fsdp_modules

CUT = "an error or a second Stop has cut its training off, so the ranks' parts of it may be a step apart."
_ALONE = "the ranks that had the other parts of it have ended."
_OLD_TORCH = "a cell was cut off in a pass that gathered its parts, which torch before 2.13 cannot take back."
_OTHER_GROUP = "its parts belong to a process group of the script's own, which is gone."


def rejoin() -> None:
    """Gives every sharded model of this process the new process group, which has the name of the old one.

    Weights that cannot get it are lost.
    """
    for root in _roots():
        if not forget_pass(root):
            lose(root, _OLD_TORCH)
            continue
        try:
            for info in {id(info): info for info in _mesh_infos(root)}.values():
                # Weights ask their mesh for its group by name each time, FSDP2 once.
                info.__post_init__()
        except RuntimeError:  # A mesh of groups that the script has made.
            lose(root, _OTHER_GROUP)


def lose_all() -> None:
    """Lets no sharded model of this process be used: the other ranks are gone, and their parts with them."""
    for root in _roots():
        lose(root, _ALONE)


def lose(model: nn.Module, why: str) -> None:
    """Lets a model neither compute nor be saved any more: both would raise what names no cause, or use half of it."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise SetupError(f"{class_of(model).__name__}: {why}", hint="Load the model again, or what was saved of it.")

    module: Any
    for module in model.modules():
        module.register_forward_pre_hook(refuse, prepend=True)
        module.register_state_dict_pre_hook(refuse)
        if hasattr(module, "generate"):  # Engines let it gather weights before the module is called.
            module.generate = refuse


def _roots() -> list[Any]:
    """The outermost modules of this process that `fully_shard` was called on, also those that no Trainer has."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    found = [module for module in gc.get_objects() if issubclass(type(module), fsdp.FSDPModule)]
    below = {id(inner) for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if id(module) not in below]


def _mesh_infos(root: nn.Module) -> list[Any]:
    """What FSDP2 knows of the ranks of each module: a mesh and its groups."""
    states = [module._get_fsdp_state() for module in fsdp_modules(root)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    found = [getattr(o, name) for o in (*groups, *parameters) for name in ("mesh_info", "post_forward_mesh_info")]
    return [info for info in found if info is not None]
