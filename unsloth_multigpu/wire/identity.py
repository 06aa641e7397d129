"""Finds whether this process is a rank, and which, by the variables of its launcher: ours, torchrun, or srun."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from unsloth_multigpu.errors import LaunchError, SetupError
from unsloth_multigpu.wire.context import RunContext

DEFAULT_MASTER_PORT = 29500
_SPAWN = "torch.multiprocessing.spawn"


@dataclass(frozen=True)
class RankIdentity:
    """This process among all ranks of the run.

    Args:
        rank: 0 .. world_size - 1 over all nodes.
        local_rank: 0 .. local_world_size - 1 on this node; also the index of its device.
        launcher: "unsloth_multigpu", "notebook", "torchrun" (also accelerate), "slurm", or "none" for a single process.
        master_addr, master_port: Host and TCP port of the store of rank 0.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_MASTER_PORT

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size):
            raise LaunchError(
                f"The launcher's variables contradict each other: rank={self.rank} world_size={self.world_size} "
                f"local_rank={self.local_rank} local_world_size={self.local_world_size}.",
                hint="Unset RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, or start with torchrun.",
            )

    def variables(self) -> dict[str, str]:
        """Returns the variables from which torch, accelerate and Unsloth read the rank."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


SINGLE_PROCESS = RankIdentity(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="none")


def read_identity(environment: Mapping[str, str], *, is_kernel: bool = False) -> RankIdentity | None:
    """Returns the identity of this rank, or None if no launcher started this process.

    jupyter-distributed also sets the variables of a rank in a single kernel, which may start ranks like any other.

    Raises:
        LaunchError: The variables contradict each other or are incomplete.
    """
    # A pod of Kubeflow's PyTorchJob has no LOCAL_RANK: there RANK is the number of the pod.
    is_alone = environment.get("WORLD_SIZE") == "1" and (is_kernel or "LOCAL_RANK" not in environment)
    if "RANK" in environment and "WORLD_SIZE" in environment and not is_alone:
        return _from_torchrun(environment)
    # In a batch script outside srun, SLURM sets SLURM_NTASKS but no step size: that process is not a rank.
    if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _from_slurm(environment)
    return None


def is_helper() -> bool:
    """True in a helper process of multiprocessing, which is not a rank and starts none.

    Data loaders and `Dataset.map` start helpers, which may import the script. `torch.multiprocessing.spawn` starts
    ranks, also for accelerate's `notebook_launcher` and Lightning: a rank has opened a process group, or `spawn` has
    called its function.

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


def first_host(nodelist: str) -> str:
    """Returns the first host of a SLURM node list: "gpu[03-05,09],cpu1" -> "gpu03"."""
    return re.sub(r"^([^\[,]+)(?:\[([^\],-]+))?.*", r"\1\2", nodelist)


def _from_torchrun(env: Mapping[str, str]) -> RankIdentity:
    world_size = _number(env, "WORLD_SIZE")
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if world_size > 1 and missing:
        raise LaunchError(
            f"RANK and WORLD_SIZE={world_size} are set, but {', '.join(missing)} is not.",
            hint="Start with torchrun, or unset RANK and WORLD_SIZE so that unsloth_multigpu starts the ranks. If they "
            "count machines: env -u RANK -u WORLD_SIZE unsloth-multigpu run --nnodes ... --node-rank ... "
            "--rdzv-endpoint ... --rdzv-id ... train.py",
        )
    return RankIdentity(
        rank=_number(env, "RANK"),
        local_rank=_number(env, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
        launcher=RunContext.read(env).launcher or "torchrun",
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", DEFAULT_MASTER_PORT),
    )


def _from_slurm(env: Mapping[str, str]) -> RankIdentity:
    # "2(x3),1" = three nodes with two tasks, then one with one.
    tasks_per_node: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        tasks_per_node += [int(count)] * int(repeat or 1)
    node = _number(env, "SLURM_NODEID", 0)
    world_size = _number(env, "SLURM_STEP_NUM_TASKS")
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    # Derived from the job id, because two jobs on one host need different ports.
    port = 15000 + _number(env, "SLURM_JOB_ID", 0) % 10000
    return RankIdentity(
        rank=_number(env, "SLURM_PROCID"),
        local_rank=_number(env, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=tasks_per_node[node] if node < len(tasks_per_node) else world_size,
        launcher="slurm",
        master_addr=env.get("MASTER_ADDR") or first_host(nodelist),
        master_port=_number(env, "MASTER_PORT", port),
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, default)
    if text is None:
        raise LaunchError(f"{name} is not set.", hint="Start the ranks with one launcher: torchrun or srun.")
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r}; expected a whole number.", hint=f"Unset {name}.") from None
