"""A process that multiprocessing started: a helper of a script, or a rank of a launcher that starts functions.

Data loaders and `Dataset.map` start helpers, which may import the script and must do nothing there.
`torch.multiprocessing.spawn`, accelerate's `notebook_launcher` and Lightning start ranks in the same way.

Needs no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress

import psutil

from unsloth_multigpu.errors import LaunchError, SetupError
from unsloth_multigpu.options import ENV_RANK_PID
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import read_identity

_SPAWN = "torch.multiprocessing.spawn"


def is_helper() -> bool:
    """True in a process that multiprocessing started to be a helper: it is not a rank and starts none. Else False.

    Raises:
        SetupError: It is one of several ranks, but its variables do not say which.
        LaunchError: The variables contradict each other or are incomplete.
    """
    # A spawned process that is importing the script does not know its parent yet; multiprocessing marks that state.
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
    parents: dict[str, str] = {}
    with suppress(psutil.Error):
        parents = psutil.Process(os.getppid()).environ()
    role = find_role(os.environ, parents, own_pid=os.getpid(), is_one_of_several=has_group or is_spawned)
    if role == "rank":
        os.environ[ENV_RANK_PID] = str(os.getpid())
    return role == "helper"


def find_role(
    environment: Mapping[str, str], parents: Mapping[str, str], *, own_pid: int, is_one_of_several: bool
) -> str:
    """Decides what a process is that multiprocessing has started. Pure.

    Args:
        environment: Its variables.
        parents: The variables with which its parent process was started.
        own_pid: Its process id.
        is_one_of_several: It has opened a process group, or `torch.multiprocessing.spawn` has called its function.

    Returns:
        "rank" or "helper".

    Raises:
        SetupError: It is one of several ranks, but its variables do not say which.
        LaunchError: The variables contradict each other or are incomplete.
    """
    told = RunContext.read(environment)
    # This package starts ranks as commands. A rank that multiprocessing started leaves its process id for its helpers.
    if told.run_dir is not None or (told.rank_pid or own_pid) != own_pid:
        return "helper"
    own = read_identity(environment)
    if own is not None and own.world_size > 1:
        theirs = None
        with suppress(LaunchError):
            theirs = read_identity(parents)
        # The parent may have been started as that very rank: this process has inherited the variables.
        is_same = theirs is not None and (theirs.rank, theirs.world_size) == (own.rank, own.world_size)
        return "helper" if is_same else "rank"
    if is_one_of_several:
        raise SetupError(
            "This process is one of several that multiprocessing has started, but its variables do not say which rank "
            "it is.",
            hint="Before this call set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or start the script "
            "with `python train.py` and without spawn: this line starts the ranks.",
        )
    return "helper"
