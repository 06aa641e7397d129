"""Values under names, in each kind of store that ranks share."""

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
