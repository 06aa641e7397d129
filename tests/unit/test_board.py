"""Values under names, in each kind of store that ranks share; rank 0, which serves it, leaves it last."""

import json
import platform
import subprocess
import sys
import time

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from unsloth_multigpu.errors import DistributedError, RankTimeoutError
from unsloth_multigpu.group.board import Board


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
