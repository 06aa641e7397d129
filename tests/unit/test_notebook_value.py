"""Values that rank 0 makes alone: both ends of the channel, without one."""

import subprocess
from types import SimpleNamespace

import pytest
from IPython.utils.text import SList

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.notebook.kernel import error_text
from unsloth_multigpu.notebook.kernel_share import LeftAloneError, Publisher, Receiver


class Pair:
    """A kernel and a worker that hear each other at once."""

    def __init__(self):
        self.kernel = SimpleNamespace(current=None, send=self.send)
        self.publisher, self.receiver = Publisher(self.kernel), Receiver(lambda *_, **__: None)

    def send(self, _kind, **fields):
        self.receiver.put(fields)

    def begin(self, number):
        self.kernel.current = SimpleNamespace(number=number, stop_s=None)
        self.publisher.begin()
        self.receiver.enter(number, is_replay=False)


@pytest.fixture
def pair():
    pair = Pair()
    pair.begin(1)
    return pair


@pytest.mark.parametrize(("value", "plain"), [(SList("ab"), ["a", "b"]), (3, 3), ("text", "text"), ({1}, None)])
def test_what_is_sent_is_plain_and_what_is_kept_is_not(pair, value, plain):
    assert pair.publisher.make("a", lambda: value) is value
    received = pair.receiver.make("a", lambda: 1 / 0)
    assert (received, type(received)) == (plain, type(plain))
    with pair.receiver.detached(is_apart=True):
        assert pair.receiver.make("a", lambda: "own") == "own"


@pytest.mark.parametrize(
    "error", [EOFError("no answer"), subprocess.CalledProcessError(3, ["x"], "out"), OSError(2, "gone"), KeyError("k")]
)
def test_an_error_of_rank_0_is_one_of_its_class_on_the_other_ranks(pair, error):
    def make():
        raise error

    with pytest.raises(type(error)):
        pair.publisher.make("a", make)
    with pytest.raises(type(error), match="rank 0 failed in a: ") as raised:
        pair.receiver.wait_for("a")
    assert isinstance(raised.value, DistributedError)
    assert error_text(raised.value) == error_text(error), "the ranks have ended alike"


def test_a_value_that_was_made_before_the_worker_existed_is_not_known(pair):
    pair.receiver.is_replay = True
    assert pair.receiver.make("%pip install x", lambda: 1 / 0, is_value=False) is None
    with pytest.raises(LeftAloneError, match=r"input\(\) was run before .*\n.*enable_multi_gpu\(\) in the first cell"):
        pair.receiver.make("input()", lambda: 1 / 0)


def test_a_worker_is_not_left_alone_for_ever(pair):
    pair.receiver.note_left(1)
    with pytest.raises(LeftAloneError, match=r"rank 0 has left the cell without input\(\)"):
        pair.receiver.wait_for("input()")
