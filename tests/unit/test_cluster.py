"""What a process says in a pod of Kubeflow Trainer, and how it waits for the pod where the nodes meet."""

import os
import socket
from unittest.mock import Mock, call

import pytest

from unsloth_multigpu.errors import ConfigError, LaunchError
from unsloth_multigpu.launch import nodes
from unsloth_multigpu.launch.nodes import address_towards, await_name
from unsloth_multigpu.options import ENV_PREFIX, MultiGPUConfig
from unsloth_multigpu.start import check_cluster

MEETING = {"rdzv_endpoint": "host:1", "rdzv_id": "job"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith((ENV_PREFIX, "PET_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "option", "given"),
    [
        ("PET_NNODES", "2", "nnodes=1: each node would train by itself", {"nnodes": 2, **MEETING}),
        ("PET_NNODES", "1:4", "nnodes=1: each node would train by itself", {"nnodes": 3, **MEETING}),
        ("PET_NPROC_PER_NODE", "4", "num_gpus=None: all devices of the machine would train", {"num_gpus": 1}),
    ],
)
def test_pod_that_would_train_by_itself_is_refused(name, value, option, given, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}' is set, and {option}") as error:
        check_cluster(MultiGPUConfig())
    assert f"Set {ENV_PREFIX}{next(iter(given)).upper()}" in str(error.value)
    # What was given counts, whatever the cluster says.
    check_cluster(MultiGPUConfig(**given))


@pytest.mark.parametrize("ranks", ["", "auto", "gpu", "cuda"])
def test_pod_that_is_alone_trains(ranks, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", ranks)
    check_cluster(MultiGPUConfig())


def test_name_of_a_machine_that_starts_later_is_waited_for(monkeypatch):
    unknown = socket.gaierror(socket.EAI_NONAME, "unknown")
    resolve = Mock(side_effect=[unknown, unknown, unknown, ()])
    monkeypatch.setattr(nodes, "_resolve", resolve)
    monkeypatch.setattr(nodes, "_NAME_POLL_S", 0.01)
    await_name("llama-node-0-0.llama", 29500, 5.0)
    assert resolve.call_args_list == [call("llama-node-0-0.llama", 29500)] * 4
    monkeypatch.setattr(nodes, "_resolve", Mock(side_effect=unknown))
    await_name("nowhere", 1, 0.05)
    with pytest.raises(LaunchError, match="rdzv_endpoint: this machine has no route to 'nowhere': unknown"):
        address_towards("nowhere", 1)
