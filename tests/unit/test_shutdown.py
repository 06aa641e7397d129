"""Rank 0, which serves the store, leaves last; but not for the dead, and not for ever."""

import json
import platform
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from unsloth_multigpu.group import manager as manager_module
from unsloth_multigpu.group.board import Board
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.identity import RankIdentity


def seconds_to_leave(store, world_size, limit_s):
    begin_s = time.monotonic()
    Board(0, store).leave(world_size, limit_s)
    return time.monotonic() - begin_s


def test_dead_process_of_this_machine_is_not_waited_for():
    store = dist.HashStore()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    Board(1, store).publish("needs/1", json.dumps([platform.node(), child.pid]))
    assert seconds_to_leave(store, 2, 60.0) < 30.0
    # The same number on another machine says nothing.
    Board(1, store).publish("needs/1", json.dumps(["elsewhere", child.pid]))
    assert seconds_to_leave(store, 2, 0.2) >= 0.2


def test_stay_has_a_limit_and_says_for_whom(caplog):
    store = dist.HashStore()
    for rank in (1, 3):
        Board(rank, store).come()
    Board(3, store).leave(4, 60.0)
    # Rank 2 has not come yet.
    assert 0.2 <= seconds_to_leave(store, 4, 0.2) < 20.0
    assert "rank(s) 1, 2 have not left within 0.2 s" in caplog.text


@pytest.mark.parametrize(
    ("launcher", "world_size", "agent", "stays"),
    [
        ("slurm", 2, None, True),
        ("torchrun", 2, None, True),  # Ray sets the variables of torchrun, and serves no store.
        ("torchrun", 2, "True", False),
        ("unsloth_multigpu", 2, "True", False),
        ("notebook", 2, None, False),
        ("none", 1, None, False),
    ],
)
def test_only_a_store_that_goes_with_rank_0_is_left(monkeypatch, launcher, world_size, agent, stays):
    store = dist.HashStore()
    monkeypatch.setattr(manager_module, "TCPStore", lambda *_, **__: store)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if agent is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    manager = DDPManager(RankIdentity(0, 0, world_size, world_size, launcher), MultiGPUConfig())
    left = []
    monkeypatch.setattr(Board, "leave", lambda _, world_size, limit_s: left.append(limit_s))
    manager.leave_store(1.0)  # Nobody has met there.
    assert left == []
    manager.publish("key")
    for limit_s in (2.0, 3.0):  # Once.
        manager.leave_store(limit_s)
    assert left == ([2.0] if stays else [])
