"""What the variables of Kubeflow Trainer say, and what a run takes of it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from unsloth_multigpu.errors import ConfigError, LaunchError
from unsloth_multigpu.launch import nodes
from unsloth_multigpu.launch.cluster import read_cluster, take
from unsloth_multigpu.launch.nodes import await_name
from unsloth_multigpu.options import ENV_PREFIX, MultiGPUConfig
from unsloth_multigpu.start import config_on_cluster

# What Kubeflow Trainer 2.1 sets in the second of two pods of the TrainJob "llama".
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "llama-node-0-0.llama",
    "PET_MASTER_PORT": "29500",
}


def values(environment: dict[str, str]) -> dict[str, Any]:
    cluster = read_cluster(environment)
    assert all(environment[name] for _, name in cluster.values())
    return {option: value for option, (value, _) in cluster.items()}


def test_kubeflow_says_how_the_nodes_meet() -> None:
    endpoint = "llama-node-0-0.llama:29500"
    expected = {"nnodes": "2", "rdzv_endpoint": endpoint, "rdzv_id": "llama-node-0-0.llama", "node_rank": "1"}
    assert values(KUBEFLOW) == expected
    assert values({**KUBEFLOW, "PET_NPROC_PER_NODE": "4"}) == {**expected, "num_gpus": "4"}
    assert values({**KUBEFLOW, "PET_MASTER_ADDR": "fd00::7"})["rdzv_endpoint"] == "[fd00::7]:29500"


def test_one_node_needs_no_place_to_meet() -> None:
    alone = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "x"}
    assert values(alone) == {"nnodes": "1", "num_gpus": "2"}
    # As torchrun reads it.
    assert values({"PET_NPROC_PER_NODE": "2"}) == {"num_gpus": "2"}


@pytest.mark.parametrize("name", [name for name in KUBEFLOW if name != "PET_NPROC_PER_NODE"])
def test_variable_that_is_missing_is_named(name: str) -> None:
    for rest in ({k: v for k, v in KUBEFLOW.items() if k != name}, {**KUBEFLOW, name: ""}):
        with pytest.raises(ConfigError, match=f"is set, but {name} is not") as error:
            read_cluster(rest)
        assert f"Set {name}" in str(error.value)


def test_nodes_that_come_and_go_are_refused_with_the_command_that_has_them(
    on_cluster: Callable[..., MultiGPUConfig],
) -> None:
    with pytest.raises(ConfigError, match=r"'1:4'; expected NUMBER.*\nHint: .* torchrun --nnodes MIN:MAX "):
        on_cluster({**KUBEFLOW, "PET_NNODES": "1:4"})


def test_what_was_given_wins_and_a_contradiction_is_said() -> None:
    cluster = read_cluster({**KUBEFLOW, "PET_NPROC_PER_NODE": "8"})
    taken = take(cluster, {"num_gpus": 4, "rdzv_id": "mine", "nnodes": "2", "balance": "off"})
    assert taken.values == {"rdzv_endpoint": "llama-node-0-0.llama:29500", "node_rank": "1"}
    assert taken.told == (
        "taken from the cluster: rdzv_endpoint=llama-node-0-0.llama:29500 from PET_MASTER_ADDR, "
        "node_rank=1 from PET_NODE_RANK"
    )
    assert taken.contradictions == (
        "num_gpus=4 was given and is taken; PET_NPROC_PER_NODE says 8",
        "rdzv_id=mine was given and is taken; PET_MASTER_ADDR says llama-node-0-0.llama",
    )
    # A node that was asked to train alone meets nobody.
    taken = take(cluster, {"nnodes": 1, "num_gpus": 1})
    assert taken.values == {}
    assert any(line.startswith("nnodes=1 was given") for line in taken.contradictions)


@pytest.fixture
def on_cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MultiGPUConfig]:
    """The config of a process with the given variables."""
    for name in list(os.environ):
        if name.startswith((ENV_PREFIX, "PET_")):
            monkeypatch.delenv(name)

    def resolve(environment: dict[str, str], *, is_notebook: bool = False, **arguments: Any) -> MultiGPUConfig:
        # What the call writes is taken back, too.
        for name in ("NNODES", "RDZV_ENDPOINT", "RDZV_ID", "NODE_RANK", "NUM_GPUS"):
            monkeypatch.setenv(ENV_PREFIX + name, "")
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        return config_on_cluster(MultiGPUConfig.resolve(arguments), arguments, is_notebook=is_notebook)

    return resolve


def test_ranks_read_the_same_options(
    on_cluster: Callable[..., MultiGPUConfig], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        config = on_cluster(KUBEFLOW, num_gpus=3)
    assert (config.num_gpus, config.nnodes, config.node_rank) == (3, "2", 1)
    assert MultiGPUConfig.resolve({"num_gpus": 3}) == config
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    for part in ("nnodes=2 from PET_NNODES", "rdzv_endpoint=llama-node-0-0.llama:29500 from PET_MASTER_ADDR"):
        assert part in record.getMessage()


def test_notebook_says_that_it_trains_alone(
    on_cluster: Callable[..., MultiGPUConfig], caplog: pytest.LogCaptureFixture
) -> None:
    assert on_cluster(KUBEFLOW, is_notebook=True).nnodes == "1"
    (record,) = caplog.records
    assert record.getMessage().startswith("PET_NNODES says nnodes=2: a notebook trains on this machine alone")


def test_name_of_a_machine_that_starts_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve(host: str, port: int) -> tuple[Any, ...]:
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ()

    monkeypatch.setattr(nodes, "_resolve", resolve)
    monkeypatch.setattr(nodes, "_NAME_POLL_S", 0.01)
    await_name("llama-node-0-0.llama", 29500, 5.0)
    assert asked == ["llama-node-0-0.llama"] * 4
    monkeypatch.setattr(nodes, "_resolve", lambda *place: (_ for _ in ()).throw(socket.gaierror(-2, "unknown")))
    with pytest.raises(LaunchError, match=r"'nowhere', where the nodes meet, was not known after 0\.05 s"):
        await_name("nowhere", 1, 0.05)
