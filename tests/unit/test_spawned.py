"""Helpers of a script and ranks, where multiprocessing has started both."""

import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import torch.utils.data

from unsloth_multigpu.errors import LaunchError, SetupError
from unsloth_multigpu.options import ENV_RUN_DIR
from unsloth_multigpu.wire.identity import is_helper

RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def child(monkeypatch):
    """This process as a child of multiprocessing, without variables of a rank."""
    for name in (*RANK, ENV_RUN_DIR):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=1))
    return monkeypatch


def from_spawn():
    """What `torch.multiprocessing.spawn` gets as the result of its function."""

    def train():
        return enable()

    def enable():
        return is_helper()

    return eval("f()", {"__name__": "torch.multiprocessing.spawn", "f": train})


def become_rank(child):
    for name, value in RANK.items():
        child.setenv(name, value)


def test_process_that_spawn_has_started_with_variables_of_its_own_is_a_rank(child):
    become_rank(child)
    assert not from_spawn()
    assert is_helper()  # What a rank starts itself inherits the variables.
    child.setenv(ENV_RUN_DIR, "/run")
    assert from_spawn()  # Of one of ours.


def test_process_that_has_opened_a_group_is_a_rank(child):
    become_rank(child)
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    child.setitem(sys.modules, "torch.distributed", group)
    assert not is_helper()


def test_rank_that_does_not_know_itself_is_refused(child):
    with pytest.raises(SetupError, match="one of several that multiprocessing has started") as error:
        from_spawn()
    assert "Before this call set RANK" in str(error.value)
    child.setenv("RANK", "0")
    child.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="LOCAL_RANK"):
        from_spawn()


def test_only_children_of_multiprocessing_are_asked(child):
    become_rank(child)
    with child.context() as alone:
        alone.setattr(multiprocessing, "parent_process", lambda: None)
        assert not is_helper()
    child.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
    assert from_spawn()  # A worker of a data loader.
    child.setattr(torch.utils.data, "get_worker_info", lambda: None)
    child.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    assert from_spawn()  # It is importing the script.
