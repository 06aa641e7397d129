"""What ranks say to each other beside gradients: values under names in a store, whom they meet, how long they wait."""

import dataclasses
import json
import platform
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from unsloth_multigpu.errors import DistributedError, DivergenceError, RankTimeoutError, ResumeError
from unsloth_multigpu.group import manager as module
from unsloth_multigpu.group.board import Board
from unsloth_multigpu.group.manager import DDPManager, find_accelerator
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.session import Session
from unsloth_multigpu.start import visible_accelerators
from unsloth_multigpu.wire.identity import RankIdentity

CUDA = torch.device("cuda")
ONE_OF_TWO = RankIdentity(0, 0, 2, 2, "torchrun", "127.0.0.1", 29500)


@pytest.fixture
def store(monkeypatch):
    """A launcher's, which outlives the ranks."""
    store = dist.HashStore()
    monkeypatch.setattr(module, "TCPStore", lambda *_, **__: store)
    return store


def test_keys_of_an_attempt_are_not_seen_in_the_next(store, monkeypatch):
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        for number in (0, 1):  # A later enable_multi_gpu() in the same process.
            manager = DDPManager(ONE_OF_TWO, MultiGPUConfig(), number)
            assert not manager.is_published("key")
            manager.publish("key")
            assert manager.is_published("key")


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
def test_only_a_store_that_goes_with_rank_0_is_left(store, monkeypatch, launcher, world_size, agent, stays):
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


@pytest.mark.timeout(60)
def test_rank_that_does_not_come_to_the_group_is_named(store):
    identity = dataclasses.replace(ONE_OF_TWO, world_size=4, local_world_size=4)
    managers = [DDPManager(dataclasses.replace(identity, rank=r), MultiGPUConfig(timeout_s=0.05)) for r in range(4)]
    for rank, missing in ((2, "ranks 0, 1, 3"), (0, "ranks 1, 3"), (3, "rank 1")):
        with pytest.raises(RankTimeoutError, match=f"^{missing} did not come to open the process group within 0.05 s"):
            managers[rank].open_group()
    managers[1].meet_ranks()
    managers[0].meet_ranks()


@pytest.mark.timeout(60)
def test_rank_whose_training_has_failed_waits_until_the_others_have_left_it(store):
    config = MultiGPUConfig(timeout_s=0.05)
    first, second = (Session(config, dataclasses.replace(ONE_OF_TWO, rank=r, local_rank=r), index=0) for r in range(2))
    second.has_failed = True  # And its script has caught the error.
    told = r"rank 1 waited 0\.05 seconds for rank 0 to leave the training that has failed on this rank"
    with pytest.raises(RankTimeoutError, match=told):
        second._wait_for_ranks_after_failure(1)
    first._wait_for_ranks_after_failure(1)  # It waits for nobody: its own training has ended well.
    second._wait_for_ranks_after_failure(1)


def test_other_ranks_get_what_rank_0_returns_or_its_error(store):
    ranks = [DDPManager(dataclasses.replace(ONE_OF_TWO, rank=rank), MultiGPUConfig()) for rank in range(2)]
    for rank, work in ((0, lambda: [1, "a"]), (1, pytest.fail)):
        assert ranks[rank].lead("first", "counting", work, timeout_s=5.0) == [1, "a"]

    def fail():
        raise ResumeError("It cannot.", hint="Do.")

    with pytest.raises(ResumeError, match=r"^It cannot\."):
        ranks[0].lead("second", "counting", fail, timeout_s=5.0)
    with pytest.raises(ResumeError, match=r"^rank 0 failed in counting: ResumeError: It cannot\.") as told:
        ranks[1].lead("second", "counting", pytest.fail, timeout_s=5.0)
    assert isinstance(told.value, DistributedError)
    assert told.value.exit_code == ResumeError.exit_code
    with pytest.raises(RankTimeoutError, match=r"rank 1 waited 0\.05 seconds for rank 0 in counting"):
        ranks[1].lead("third", "counting", pytest.fail, timeout_s=0.05)


def test_group_of_another_size_is_refused(lone_group):
    with pytest.raises(DivergenceError, match="has rank=0 world_size=1, the launcher said rank=0 world_size=2"):
        DDPManager(ONE_OF_TWO, MultiGPUConfig()).open_group()


def test_facts_that_differ_are_named(monkeypatch):
    manager = DDPManager(ONE_OF_TWO, MultiGPUConfig())
    monkeypatch.setattr(manager, "gather_json", lambda value: [value, {"seed": "2", "same": "3", "theirs": "4"}])
    with pytest.raises(DivergenceError) as caught:
        manager.check_same({"seed": 1, "same": 3})
    assert "seed: rank 0 has 1, rank 1 has 2; theirs: rank 0 has None, rank 1 has 4." in str(caught.value)


def test_accelerator_is_found_as_torch_2_6_tells_of_it(monkeypatch):
    def raises():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    # These would open the device.
    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.accelerator, name, lambda: pytest.fail("opened"))
    for answer, works, found in (
        (raises, True, None),
        (lambda: torch.device("mps"), True, None),
        (lambda: CUDA, False, None),
        (lambda: CUDA, True, CUDA),
    ):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", answer)
        monkeypatch.setattr(torch.cuda, "is_available", lambda works=works: works)
        assert find_accelerator() == found
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_accelerators() == ("cuda", 3)


@pytest.fixture(params=["hash", "file", "tcp"])
def boards(request, tmp_path):
    """Two ranks' views of one store; a notebook's ranks have one in a file."""
    if request.param == "file":
        stores = [FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    elif request.param == "tcp":
        first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [first, TCPStore("127.0.0.1", first.port, is_master=False)]
    else:
        stores = [HashStore()] * 2
    return [Board(rank, PrefixStore("run", store)) for rank, store in enumerate(stores)]


@pytest.mark.parametrize("value", ["", "?", "ä="])
def test_value_is_read_once_it_is_there(boards, value):
    mine, other = boards
    assert (other.read("key"), other.is_published("key")) == (None, False)
    assert other.read("key") is None  # To look leaves nothing behind.
    mine.publish("key", value)
    assert mine.read("key") == value  # It has arrived: publish does not wait for the store.
    assert (other.read("key"), other.is_published("key")) == (value, True)
    mine.publish("key", "later")
    assert mine.read("key") == "later"
    assert other.read("key") == "later"


@pytest.mark.timeout(60)
def test_wait_has_an_end(boards):
    _, other = boards
    with pytest.raises(RankTimeoutError, match=r"rank 1 waited 0\.05 seconds for a word of rank 0"):
        other.wait_for("key", "a word of rank 0", timeout_s=0.05)
    looks = iter([None, None, 3])
    assert other.wait(lambda: next(looks), "a number", timeout_s=5.0) == 3


@pytest.mark.timeout(60)
def test_rank_that_rank_0_has_left_alone_does_not_wait(boards):
    mine, other = boards
    mine.publish("there", "value")
    other.is_abandoned = lambda: True
    assert other.wait_for("there", "what is there", timeout_s=60.0) == "value"
    with pytest.raises(DistributedError, match="rank 1 waits for a file, and rank 0 has left the cell"):
        other.wait_for("file", "a file", timeout_s=60.0)


def seconds_to_leave(store, world_size, limit_s):
    begin_s = time.monotonic()
    Board(0, store).leave(world_size, limit_s)
    return time.monotonic() - begin_s


def test_dead_process_of_this_machine_is_not_waited_for():
    store = HashStore()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    Board(1, store).publish("needs/1", json.dumps([platform.node(), child.pid]))
    assert seconds_to_leave(store, 2, 60.0) < 30.0
    # The same number on another machine says nothing.
    Board(1, store).publish("needs/1", json.dumps(["elsewhere", child.pid]))
    assert seconds_to_leave(store, 2, 0.2) >= 0.2


def test_stay_has_a_limit_and_says_for_whom(caplog):
    store = HashStore()
    for rank in (1, 3):
        Board(rank, store).come()
    Board(3, store).leave(4, 60.0)
    # Rank 2 has not come yet.
    assert 0.2 <= seconds_to_leave(store, 4, 0.2) < 20.0
    assert "rank(s) 1, 2 have not left within 0.2 s" in caplog.text
