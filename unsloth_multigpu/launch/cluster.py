"""What the variables of a cluster say of the nodes of a run, in place of `nnodes`, `rdzv_endpoint` and the like. Pure.

Kubeflow Trainer sets torchrun's own variables, PET_<OPTION>. SkyPilot has names of its own. Both set them for every
process of a node, so they describe a run only to a process that no launcher has started as a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError

# SkyPilot names no port. Its nodes reach each other on all of them.
_SKYPILOT_PORT = "29400"
# Words of torchrun for "as many as there are accelerators".
_ALL_ACCELERATORS = ("", "auto", "gpu", *KINDS)
_OF_NODES = ("nnodes", "rdzv_endpoint", "rdzv_id", "node_rank")
# Option -> its value and the variable that says so.
Cluster = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Taken:
    """What a run takes of what a cluster says.

    Args:
        values: Option -> value, only those that nobody has given.
        told: One line that says what is taken from where; "" = nothing.
        contradictions: Lines that name an option that was given, and the variable that says something else.
    """

    values: Mapping[str, str]
    told: str
    contradictions: tuple[str, ...]


def read_cluster(environment: Mapping[str, str]) -> Cluster:
    """Finds out what a cluster says of the nodes of this run; empty where no cluster has set anything.

    Args:
        environment: The variables of the process.

    Raises:
        ConfigError: A variable is missing beside others.
    """
    return _from_torchrun(environment) or _from_skypilot(environment)


def take(cluster: Cluster, given: Mapping[str, Any]) -> Taken:
    """Decides which of the cluster's values a run takes: those of options that nobody has given.

    Args:
        cluster: What its variables say.
        given: Option -> value, by argument or by UNSLOTH_MULTIGPU_<NAME>.
    """
    # A run that was asked to stay on one node has no place where nodes meet.
    is_held_here = str(given.get("nnodes")) == "1"
    contradictions = tuple(
        f"{name}={given[name]} was given and is taken; {source} says {value}"
        for name, (value, source) in cluster.items()
        if name in given and str(given[name]) != value
    )
    taken = {n: said for n, said in cluster.items() if n not in given and not (is_held_here and n in _OF_NODES)}
    shown = ", ".join(f"{name}={value} from {source}" for name, (value, source) in taken.items())
    values = {name: value for name, (value, _) in taken.items()}
    return Taken(values, shown and f"taken from the cluster: {shown}", contradictions)


def _from_torchrun(env: Mapping[str, str]) -> Cluster:
    """Kubeflow Trainer sets PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT."""
    said: Cluster = {}
    if env.get("PET_NPROC_PER_NODE", "") not in _ALL_ACCELERATORS:
        said["num_gpus"] = env["PET_NPROC_PER_NODE"], "PET_NPROC_PER_NODE"
    places = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    found = next((name for name in ("PET_NNODES", *places, "PET_RDZV_ENDPOINT") if env.get(name)), None)
    if found is None:
        return said
    said["nnodes"] = _needed(env, "PET_NNODES", found), "PET_NNODES"
    if env["PET_NNODES"] == "1":
        return said
    if env.get("PET_RDZV_ENDPOINT"):
        said["rdzv_endpoint"] = env["PET_RDZV_ENDPOINT"], "PET_RDZV_ENDPOINT"
    else:
        _, host, port = (_needed(env, name, found) for name in places)
        said["rdzv_endpoint"] = _place(host, port), "PET_MASTER_ADDR"
    of_id = next((name for name in ("PET_RDZV_ID", "PET_MASTER_ADDR") if env.get(name)), "PET_RDZV_ENDPOINT")
    said["rdzv_id"] = env[of_id], of_id
    if env.get("PET_NODE_RANK"):
        said["node_rank"] = env["PET_NODE_RANK"], "PET_NODE_RANK"
    return said


def _from_skypilot(env: Mapping[str, str]) -> Cluster:
    needed = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK")
    found = next((name for name in needed if env.get(name)), None)
    if found is None:
        return {}
    count, addresses, rank = (_needed(env, name, found) for name in needed)
    said: Cluster = {"nnodes": (count, "SKYPILOT_NUM_NODES")}
    # 0 where the task asks for none: then this package counts what is there.
    if env.get("SKYPILOT_NUM_GPUS_PER_NODE", "0") != "0":
        said["num_gpus"] = env["SKYPILOT_NUM_GPUS_PER_NODE"], "SKYPILOT_NUM_GPUS_PER_NODE"
    if count != "1":
        said["rdzv_endpoint"] = _place(addresses.split()[0], _SKYPILOT_PORT), "SKYPILOT_NODE_IPS"
        of_id = "SKYPILOT_TASK_ID" if env.get("SKYPILOT_TASK_ID") else "SKYPILOT_NODE_IPS"
        said["rdzv_id"] = env[of_id].split()[0], of_id
        said["node_rank"] = rank, "SKYPILOT_NODE_RANK"
    return said


def _place(host: str, port: str) -> str:
    """As `rdzv_endpoint` has it; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _needed(env: Mapping[str, str], name: str, found: str) -> str:
    if env.get(name):
        return env[name]
    family = name.partition("_")[0]
    raise ConfigError(
        f"{found}={env[found]!r} is set, but {name} is not.",
        hint=f"The cluster sets all {family}_* variables together. Set {name}, or unset {family}_* and give --nnodes, "
        "--rdzv-endpoint and --rdzv-id.",
    )
