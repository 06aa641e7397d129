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
from unsloth_multigpu.options import num_nodes

# SkyPilot names no port. Its nodes reach each other on all of them.
_SKYPILOT_PORT = 29400
# Words of torchrun for "as many as there are accelerators".
_ALL_ACCELERATORS = ("auto", "gpu", *KINDS)
_OF_NODES = ("nnodes", "rdzv_endpoint", "rdzv_id", "node_rank")


@dataclass(frozen=True)
class Cluster:
    """What a cluster's variables say.

    Args:
        values: Option -> value.
        sources: Option -> the variable that says so.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Taken:
    """What of it a run takes.

    Args:
        values: Option -> value, only those that nobody has given.
        told: One line that says what is taken from where; "" = nothing.
        contradictions: Lines that name an option that was given, and the variable that says something else.
    """

    values: Mapping[str, Any]
    told: str
    contradictions: tuple[str, ...]


def read_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Finds out what a cluster says of the nodes of this run.

    Args:
        environment: The variables of the process.

    Returns:
        What they say, None where no cluster has set any.

    Raises:
        ConfigError: A variable is missing beside others or has a value that cannot be used, or two clusters disagree.
    """
    pet, sky = _from_torchrun(environment), _from_skypilot(environment)
    if pet is None or sky is None:
        return pet or sky
    for name, value in pet.values.items():
        if name in ("nnodes", "num_gpus", "node_rank") and value != sky.values.get(name, value):
            raise ConfigError(
                f"{pet.sources[name]} says {name}={value}, {sky.sources[name]} says {sky.values[name]}.",
                hint="Unset the variables of the one that did not start this process.",
            )
    return pet


def take(cluster: Cluster, given: Mapping[str, Any]) -> Taken:
    """Decides which of the cluster's values a run takes: those of options that nobody has given.

    Args:
        cluster: What its variables say.
        given: Option -> value, by argument or by UNSLOTH_MULTIGPU_<NAME>.
    """
    values = dict(cluster.values)
    # A run that was asked to stay on one node has no place where nodes meet.
    is_held_here = "nnodes" in given and num_nodes(str(given["nnodes"]))[1] == 1
    contradictions = tuple(
        f"{name}={given[name]} was given and is taken; {cluster.sources[name]} says {value}"
        for name, value in values.items()
        if name in given and str(given[name]) != str(value)
    )
    taken = {n: v for n, v in values.items() if n not in given and not (is_held_here and n in _OF_NODES)}
    shown = ", ".join(f"{name}={value} from {cluster.sources[name]}" for name, value in taken.items())
    return Taken(taken, shown and f"taken from the cluster: {shown}", contradictions)


def _from_torchrun(env: Mapping[str, str]) -> Cluster | None:
    """Kubeflow Trainer sets PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and PET_MASTER_PORT."""
    places = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT")
    if not any(env.get(name) for name in ("PET_NNODES", "PET_NPROC_PER_NODE", *places)):
        return None
    said = _Said()
    if env.get("PET_NPROC_PER_NODE", "auto") not in ("", *_ALL_ACCELERATORS):
        said.take("num_gpus", "PET_NPROC_PER_NODE", _count(env, "PET_NPROC_PER_NODE", 1))
    if not env.get("PET_NNODES"):
        if found := next((name for name in places if env.get(name)), None):
            raise _missing("PET_NNODES", found, env)
        return said.cluster()
    try:
        most = num_nodes(env["PET_NNODES"])[1]
    except ConfigError:
        raise _wrong("PET_NNODES", env, 'a number, or "MIN:MAX"') from None
    said.take("nnodes", "PET_NNODES", env["PET_NNODES"])
    if most == 1:
        return said.cluster()
    if env.get("PET_RDZV_ENDPOINT"):
        said.take("rdzv_endpoint", "PET_RDZV_ENDPOINT", env["PET_RDZV_ENDPOINT"])
    else:
        for name in ("PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NODE_RANK"):
            if not env.get(name):
                raise _missing(name, "PET_NNODES", env)
        port = _count(env, "PET_MASTER_PORT", 1, 65535)
        said.take("rdzv_endpoint", "PET_MASTER_ADDR", _place(env["PET_MASTER_ADDR"], port))
    of_id = next((name for name in ("PET_RDZV_ID", "PET_MASTER_ADDR") if env.get(name)), "PET_RDZV_ENDPOINT")
    said.take("rdzv_id", of_id, env[of_id])
    if env.get("PET_NODE_RANK"):
        said.take("node_rank", "PET_NODE_RANK", _count(env, "PET_NODE_RANK", 0, most - 1))
    return said.cluster()


def _from_skypilot(env: Mapping[str, str]) -> Cluster | None:
    needed = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK")
    found = next((name for name in needed if env.get(name)), None)
    if found is None:
        return None
    for name in needed:
        if not env.get(name):
            raise _missing(name, found, env)
    said = _Said()
    # 0 where the task asks for none: then this package counts what is there.
    if env.get("SKYPILOT_NUM_GPUS_PER_NODE") and _count(env, "SKYPILOT_NUM_GPUS_PER_NODE", 0) > 0:
        said.take("num_gpus", "SKYPILOT_NUM_GPUS_PER_NODE", int(env["SKYPILOT_NUM_GPUS_PER_NODE"]))
    count = _count(env, "SKYPILOT_NUM_NODES", 1)
    said.take("nnodes", "SKYPILOT_NUM_NODES", str(count))
    addresses = env["SKYPILOT_NODE_IPS"].split()
    if len(addresses) != count:
        raise ConfigError(
            f"SKYPILOT_NODE_IPS names {len(addresses)} address(es), but SKYPILOT_NUM_NODES={count}.",
            hint="Start the task with `sky launch` or `sky exec`, which set both.",
        )
    rank = _count(env, "SKYPILOT_NODE_RANK", 0, count - 1)
    if count > 1:
        said.take("rdzv_endpoint", "SKYPILOT_NODE_IPS", _place(addresses[0], _SKYPILOT_PORT))
        of_id = "SKYPILOT_TASK_ID" if env.get("SKYPILOT_TASK_ID") else "SKYPILOT_NODE_IPS"
        said.take("rdzv_id", of_id, env[of_id].split()[0])
        said.take("node_rank", "SKYPILOT_NODE_RANK", rank)
    return said.cluster()


class _Said:
    """Collects options with the variables that they come from."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def take(self, option: str, variable: str, value: Any) -> None:
        self._values[option], self._sources[option] = value, variable

    def cluster(self) -> Cluster | None:
        return Cluster(self._values, self._sources) if self._values else None


def _place(host: str, port: int) -> str:
    """As `rdzv_endpoint` has it; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _count(env: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = env[name].strip()
    value = int(text) if text.isdecimal() else -1
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"{least} .. {most}"
        raise _wrong(name, env, f"a whole number, {limits}")
    return value


def _wrong(name: str, env: Mapping[str, str], expected: str) -> ConfigError:
    return ConfigError(f"{name}={env[name]!r}; expected {expected}.", hint=_hint(name))


def _missing(name: str, found: str, env: Mapping[str, str]) -> ConfigError:
    return ConfigError(f"{found}={env[found]!r} is set, but {name} is not.", hint=_hint(name))


def _hint(name: str) -> str:
    family = name.partition("_")[0]
    return (
        f"The cluster sets all {family}_* variables together. Set {name}, or unset {family}_* and give --nnodes, "
        "--rdzv-endpoint and --rdzv-id."
    )
