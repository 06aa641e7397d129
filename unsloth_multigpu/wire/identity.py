"""Who am I? Reads the variables that launchers set: torchrun and ours, accelerate, SLURM's srun, Open MPI's mpirun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.options import ENV_NOTEBOOK, ENV_RUN_DIR

DEFAULT_MASTER_PORT = 29500


@dataclass(frozen=True)
class RankIdentity:
    """The place of this process among all ranks of the run.

    Args:
        rank: 0 .. world_size - 1 over all nodes.
        local_rank: 0 .. local_world_size - 1 on this node; also the index of its device.
        launcher: "unsloth_multigpu", "notebook", "torchrun" (also accelerate), "slurm", "openmpi", or "none" for a
            single process.
        master_addr: Host of rank 0.
        master_port: TCP port of the store of rank 0.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_MASTER_PORT

    def variables(self) -> dict[str, str]:
        """The variables by which torch, accelerate and Unsloth know the rank."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


SINGLE_PROCESS = RankIdentity(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="none")


def read_identity(
    environment: Mapping[str, str], *, starts_ranks: bool = True, is_kernel: bool = False
) -> RankIdentity | None:
    """Finds out whether a launcher started this process as one of its ranks.

    Args:
        environment: The variables of the process.
        starts_ranks: False where a process that is no rank is taken for one that works alone. In one of several pods
            of a job it would not know of the others.
        is_kernel: The process is a notebook's. jupyter-distributed sets a rank's variables in a kernel without others,
            too: that one may start ranks as any kernel.

    Returns:
        The rank's place, or None if no launcher started this process.

    Raises:
        LaunchError: The variables contradict each other or are incomplete.
    """
    is_lone_kernel = is_kernel and environment.get("WORLD_SIZE") == "1"
    if "RANK" in environment and "WORLD_SIZE" in environment and not is_lone_kernel:
        is_one_of_several = not starts_ranks and environment.get("PET_NNODES", "1") != "1"
        if is_one_of_several or not _counts_machines(environment):
            return _from_torchrun(environment)
    # Inside a batch script, but outside srun, SLURM sets SLURM_NTASKS and no step size: that process is no rank.
    if _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _from_slurm(environment)
    if _number(environment, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        return _from_openmpi(environment)
    return None


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list: "gpu[03-05,09],cpu1" -> "gpu03"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist)
    if match is None:
        raise LaunchError(
            f"SLURM_STEP_NODELIST={nodelist!r} names no host.", hint="Set MASTER_ADDR to the host of rank 0."
        )
    return match.group(1) + (match.group(2) or "")


def _counts_machines(env: Mapping[str, str]) -> bool:
    """True in a pod of Kubeflow's PyTorchJob: RANK is the pod's number, and WORLD_SIZE says nothing of its processes.

    What starts ranks sets LOCAL_RANK as well.
    """
    if "LOCAL_RANK" in env:
        return False
    is_alone = _number(env, "WORLD_SIZE") == 1 and _number(env, "RANK") == 0
    return is_alone or (bool(env.get("PET_NNODES")) and env.get("PET_NODE_RANK") == env["RANK"])


def _from_torchrun(env: Mapping[str, str]) -> RankIdentity:
    world_size = _number(env, "WORLD_SIZE")
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if world_size > 1 and missing:
        hint = "Start with torchrun, or unset RANK and WORLD_SIZE so that unsloth_multigpu starts the ranks."
        if missing == ["LOCAL_RANK"]:
            # An older PyTorchJob. Without them each pod would train for itself.
            count, place = env.get("PET_NNODES") or world_size, env["MASTER_ADDR"]
            hint = (
                "Start with torchrun, or unset RANK and WORLD_SIZE where this is the only machine. Where they count "
                "machines, as in a pod of Kubeflow's PyTorchJob: env -u RANK -u WORLD_SIZE unsloth-multigpu run "
                f"--nnodes {count} --node-rank {env['RANK']} --rdzv-id {place} "
                f"--rdzv-endpoint {place}:{env['MASTER_PORT']} train.py"
            )
        raise LaunchError(f"RANK and WORLD_SIZE={world_size} are set, but {', '.join(missing)} is not.", hint=hint)
    return _checked(
        RankIdentity(
            rank=_number(env, "RANK"),
            local_rank=_number(env, "LOCAL_RANK", 0),
            world_size=world_size,
            local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
            launcher=_our_launcher(env) if ENV_RUN_DIR in env else "torchrun",
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(env, "MASTER_PORT", DEFAULT_MASTER_PORT),
        )
    )


def _our_launcher(env: Mapping[str, str]) -> str:
    return "notebook" if ENV_NOTEBOOK in env else "unsloth_multigpu"


def _from_slurm(env: Mapping[str, str]) -> RankIdentity:
    # "2(x3),1" = three nodes with two tasks, then one with one.
    tasks_per_node: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        tasks_per_node += [int(count)] * int(repeat or 1)
    node = _number(env, "SLURM_NODEID", 0)
    world_size = _number(env, "SLURM_STEP_NUM_TASKS")
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    # Two jobs of one user on one host must not meet at one port: SLURM's job ids differ.
    port = 15000 + _number(env, "SLURM_JOB_ID", 0) % 10000
    return _checked(
        RankIdentity(
            rank=_number(env, "SLURM_PROCID"),
            local_rank=_number(env, "SLURM_LOCALID"),
            world_size=world_size,
            local_world_size=tasks_per_node[node] if node < len(tasks_per_node) else world_size,
            launcher="slurm",
            master_addr=env.get("MASTER_ADDR") or first_host(nodelist),
            master_port=_number(env, "MASTER_PORT", port),
        )
    )


def _from_openmpi(env: Mapping[str, str]) -> RankIdentity:
    world_size = _number(env, "OMPI_COMM_WORLD_SIZE")
    local_world_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size)
    if local_world_size < world_size and "MASTER_ADDR" not in env:
        raise LaunchError(
            f"mpirun started {world_size} ranks on several hosts, but MASTER_ADDR is not set.",
            hint="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        )
    return _checked(
        RankIdentity(
            rank=_number(env, "OMPI_COMM_WORLD_RANK"),
            local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
            world_size=world_size,
            local_world_size=local_world_size,
            launcher="openmpi",
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(env, "MASTER_PORT", DEFAULT_MASTER_PORT),
        )
    )


def _checked(identity: RankIdentity) -> RankIdentity:
    if not (
        0 <= identity.rank < identity.world_size
        and 0 <= identity.local_rank < identity.local_world_size <= identity.world_size
    ):
        raise LaunchError(
            f"The launcher's variables contradict each other: rank={identity.rank} world_size={identity.world_size} "
            f"local_rank={identity.local_rank} local_world_size={identity.local_world_size}.",
            hint="Unset RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, or start with torchrun.",
        )
    return identity


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise LaunchError(
                f"{name} is not set.", hint="Start the ranks with one launcher: torchrun, srun or mpirun."
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r}; expected a whole number.", hint=f"Unset {name}.") from None
