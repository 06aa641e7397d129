"""What the variables of a cluster say about the nodes of a run: torchrun's PET_<OPTION>, as Kubeflow sets them. Pure.

They are set for every process of a node, so they describe a run only to a process that no launcher has started as a
rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError

# Words of torchrun for "as many as there are accelerators".
_ALL_ACCELERATORS = ("", "auto", "gpu", *KINDS)
_OF_NODES = ("nnodes", "rdzv_endpoint", "rdzv_id", "node_rank")
# Option -> its value and the variable that says so.
Cluster = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Taken:
    """What a run takes from its cluster.

    Args:
        values: Option -> value, only those that nobody has given.
        told: One line that says what is taken from where; "" = nothing.
        contradictions: Lines that name an option that was given, and the variable that says something else.
    """

    values: Mapping[str, str]
    told: str
    contradictions: tuple[str, ...]


def read_cluster(env: Mapping[str, str]) -> Cluster:
    """Reads PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT; empty without them.

    Args:
        env: The variables of the process.

    Raises:
        ConfigError: A variable is missing beside others.
    """
    said: Cluster = {}
    if env.get("PET_NPROC_PER_NODE", "") not in _ALL_ACCELERATORS:
        said["num_gpus"] = env["PET_NPROC_PER_NODE"], "PET_NPROC_PER_NODE"
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    found = [name for name in names if env.get(name)]
    if not found:
        return said
    is_alone = env.get("PET_NNODES") == "1"
    missing = [name for name in names if name not in found]
    if missing and not is_alone:
        raise ConfigError(
            f"{found[0]}={env[found[0]]!r} is set, but {missing[0]} is not.",
            hint=f"The cluster sets all PET_* variables together. Set {missing[0]}, or unset PET_* and give --nnodes, "
            "--rdzv-endpoint and --rdzv-id.",
        )
    said["nnodes"] = env["PET_NNODES"], "PET_NNODES"
    if not is_alone:
        host = env["PET_MASTER_ADDR"]
        place = f"[{host}]" if ":" in host else host
        said["rdzv_endpoint"] = f"{place}:{env['PET_MASTER_PORT']}", "PET_MASTER_ADDR"
        said["rdzv_id"] = host, "PET_MASTER_ADDR"
        said["node_rank"] = env["PET_NODE_RANK"], "PET_NODE_RANK"
    return said


def take(cluster: Cluster, given: Mapping[str, Any]) -> Taken:
    """Decides which of the cluster's values a run takes: those of options that nobody has given.

    Args:
        cluster: What its variables say.
        given: Option -> value, by argument or by UNSLOTH_MULTIGPU_<NAME>.
    """
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
