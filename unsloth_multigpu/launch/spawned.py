"""Tells whether a process that multiprocessing started is a helper or a rank.

Data loaders and `Dataset.map` start helpers. They may import the script, whose `enable_multi_gpu()` must then do
nothing. `torch.multiprocessing.spawn` starts ranks, also for accelerate's `notebook_launcher` and Lightning.

Needs no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import read_identity

_SPAWN = "torch.multiprocessing.spawn"


def is_helper() -> bool:
    """True in a helper process of multiprocessing, which is not a rank and starts none.

    A rank has opened a process group, or `torch.multiprocessing.spawn` has called its function.

    Raises:
        SetupError: This is one of several ranks, but its variables do not say which.
        LaunchError: The variables contradict each other or are incomplete.
    """
    # While a spawned process imports the script, multiprocessing has set `_inheriting`, and not yet the parent.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    if multiprocessing.parent_process() is None:
        return False
    loading = sys.modules.get("torch.utils.data")
    if loading is not None and loading.get_worker_info() is not None:
        return True
    dist = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    is_spawned = any(frame.f_globals.get("__name__") == _SPAWN for frame, _ in traceback.walk_stack(None))
    # This package starts ranks as commands, so any process that they spawn is a helper.
    if not (has_group or is_spawned) or RunContext.read(os.environ).run_dir is not None:
        return True
    own = read_identity(os.environ)
    if own is None or own.world_size == 1:
        raise SetupError(
            "This process is one of several that multiprocessing has started, but its variables do not say which rank "
            "it is.",
            hint="Before this call set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or start the script "
            "with `python train.py` and without spawn: enable_multi_gpu() starts the ranks.",
        )
    return False
