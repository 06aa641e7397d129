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

import psutil

from unsloth_multigpu.errors import LaunchError, SetupError
from unsloth_multigpu.options import ENV_RANK_PID, ENV_RUN_DIR
from unsloth_multigpu.wire.identity import RankIdentity, read_identity

_SPAWN = "torch.multiprocessing.spawn"


def is_helper() -> bool:
    """True in a process that multiprocessing started to be a helper: it is not a rank and starts none. Else False.

    Raises:
        SetupError: It is one of several ranks, but its variables do not say which.
        LaunchError: The variables contradict each other or are incomplete.
    """
    # While a spawned process imports the script it does not know its parent yet; multiprocessing itself tells that
    # state by this attribute.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    if multiprocessing.parent_process() is None:
        return False
    loading = sys.modules.get("torch.utils.data")
    if loading is not None and loading.get_worker_info() is not None:
        return True
    role = find_role(
        os.environ,
        _environment_of(os.getppid()),
        own_pid=os.getpid(),
        group_size=_group_size(),
        is_spawned_by_torch=_is_called_by(_SPAWN),
    )
    if role == "rank":
        os.environ[ENV_RANK_PID] = str(os.getpid())
    return role == "helper"


def find_role(
    environment: Mapping[str, str],
    parents: Mapping[str, str],
    *,
    own_pid: int,
    group_size: int,
    is_spawned_by_torch: bool,
) -> str:
    """Decides what a process is that multiprocessing has started. Pure.

    Args:
        environment: Its variables.
        parents: The variables with which its parent process was started.
        own_pid: Its process id.
        group_size: Ranks of the process group that it has opened, 0 = none.
        is_spawned_by_torch: `torch.multiprocessing.spawn`, or what builds on it, has called the user's function.

    Returns:
        "rank" or "helper".

    Raises:
        SetupError: It is one of several ranks, but its variables do not say which.
        LaunchError: The variables contradict each other or are incomplete.
    """
    # This package starts ranks as commands. A rank that multiprocessing started leaves its process id for its helpers.
    is_of_a_rank = ENV_RUN_DIR in environment or environment.get(ENV_RANK_PID, str(own_pid)) != str(own_pid)
    own = None if is_of_a_rank else read_identity(environment)
    if own is not None and own.world_size > 1:
        return "helper" if _is_same(own, parents) else "rank"
    if not is_of_a_rank and (group_size > 1 or is_spawned_by_torch):
        raise SetupError(
            "This process is one of several that multiprocessing has started, but its variables do not say which rank "
            "it is.",
            hint="Before this call set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or start the script "
            "with `python train.py` and without spawn: this line starts the ranks.",
        )
    return "helper"


def _is_same(own: RankIdentity, parents: Mapping[str, str]) -> bool:
    """True where the parent was started as that very rank, whose variables this process has inherited."""
    try:
        theirs = read_identity(parents)
    except LaunchError:
        return False
    return theirs is not None and (theirs.rank, theirs.world_size) == (own.rank, own.world_size)


def _environment_of(pid: int) -> dict[str, str]:
    """The variables with which a process was started; empty where the system does not tell."""
    try:
        return dict(psutil.Process(pid).environ())
    except psutil.Error:
        return {}


def _group_size() -> int:
    dist = sys.modules.get("torch.distributed")
    return dist.get_world_size() if dist is not None and dist.is_available() and dist.is_initialized() else 0


def _is_called_by(module: str) -> bool:
    return any(frame.f_globals.get("__name__") == module for frame, _ in traceback.walk_stack(None))
