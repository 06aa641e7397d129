"""Helpers of a script and ranks, where multiprocessing has started both."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch.utils.data

from unsloth_multigpu.errors import LaunchError, SetupError
from unsloth_multigpu.launch import spawned
from unsloth_multigpu.launch.spawned import find_role, is_helper
from unsloth_multigpu.options import ENV_RANK_PID, ENV_RUN_DIR

RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
NODES = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def role(environment: Mapping[str, str], parents: Mapping[str, str] | None = None, several: bool = False) -> str:
    return find_role(environment, parents or {}, own_pid=7, is_one_of_several=several)


@pytest.mark.parametrize("several", [False, True])
def test_process_with_variables_of_its_own_is_a_rank(several: bool) -> None:
    assert role(RANK, {}, several) == "rank"
    # One task for each node, which starts a process for each of its cards.
    assert role({**NODES, **RANK, "RANK": "5", "WORLD_SIZE": "8"}, NODES, several) == "rank"
    assert role({**RANK, ENV_RANK_PID: "7"}, {}, several) == "rank"  # Its second call.


@pytest.mark.parametrize(
    ("environment", "parents"),
    [
        ({}, {}),
        ({"WORLD_SIZE": "1", "RANK": "0"}, {}),
        (RANK, RANK),  # Of a rank that torchrun has started.
        ({**SLURM, **RANK}, SLURM),
        ({**RANK, ENV_RUN_DIR: "/run"}, {}),  # Of one of ours.
        ({**RANK, ENV_RANK_PID: "6"}, {}),  # Of one that multiprocessing has started.
    ],
)
def test_helper_of_a_script_or_of_a_rank_is_none(environment: dict[str, str], parents: dict[str, str]) -> None:
    assert role(environment, parents) == "helper"


def test_rank_that_does_not_know_itself_is_refused() -> None:
    with pytest.raises(SetupError, match="one of several that multiprocessing has started") as error:
        role({}, {}, several=True)
    assert "Before this call set RANK" in str(error.value)
    with pytest.raises(LaunchError, match="LOCAL_RANK"):
        role({"RANK": "0", "WORLD_SIZE": "2"})


def test_only_children_of_multiprocessing_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(ENV_RUN_DIR, raising=False)
    monkeypatch.setenv(ENV_RANK_PID, "")
    monkeypatch.delenv(ENV_RANK_PID)
    # The parent was started without these variables.
    monkeypatch.setattr(spawned.psutil, "Process", lambda pid: SimpleNamespace(environ=dict))
    assert not is_helper()
    with monkeypatch.context() as child:
        child.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
        child.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
        assert is_helper()  # It is importing the script.
        child.setattr(multiprocessing.current_process(), "_inheriting", False, raising=False)
        child.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
        assert is_helper()  # A worker of a data loader.
        child.setattr(torch.utils.data, "get_worker_info", lambda: None)
        assert not is_helper()
