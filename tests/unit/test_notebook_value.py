"""Values that rank 0 makes alone: both ends of the channel, without one."""

from __future__ import annotations

import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.utils.text import SList

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.notebook.cell import error_text
from unsloth_multigpu.notebook.value import (
    LeftAloneError,
    Publisher,
    Receiver,
)


class Pair:
    """A kernel and a worker that hear each other at once."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.has_told = threading.Event()
        self.kernel: Any = SimpleNamespace(current=None, send=self.send)
        self.publisher, self.receiver = Publisher(self.kernel), Receiver(self._tell)
        self.receiver.is_replay = False

    def _tell(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))
        self.has_told.set()

    def send(self, _kind: str, **fields: Any) -> None:
        self.receiver.put(fields)

    @property
    def sent(self) -> list[str]:
        """Keys of the values that were sent and not taken yet."""
        return list(self.receiver._values)

    def begin(self, number: int) -> None:
        self.kernel.current = SimpleNamespace(number=number, stop_s=None)
        self.receiver.cell_number = number


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.begin(1)
    return pair


def test_a_value_of_an_earlier_cell_is_none_of_this_one(pair: Pair) -> None:
    pair.publisher.make("a", lambda: "old")  # Nobody asks for it.
    pair.begin(2)
    pair.publisher.make("a", lambda: "new")
    assert pair.receiver.wait_for("a") == "new"
    assert pair.sent == []


def test_only_the_outermost_of_two_values_is_sent(pair: Pair) -> None:
    assert pair.publisher.make("%pip", lambda: pair.publisher.make("!", lambda: 5)) == 5
    assert pair.sent == ["%pip/0"]
    with pair.publisher.detached():
        pair.publisher.make("!", lambda: 6)
    assert pair.sent == ["%pip/0"]


@pytest.mark.parametrize(("value", "plain"), [(SList("ab"), ["a", "b"]), (3, 3), ("text", "text"), ({1}, None)])
def test_what_is_sent_is_plain_and_what_is_kept_is_not(pair: Pair, value: Any, plain: Any) -> None:
    assert pair.publisher.make("a", lambda: value) is value
    received = pair.receiver.make("a", lambda: 1 / 0)
    assert (received, type(received)) == (plain, type(plain))
    with pair.receiver.detached(is_apart=True):
        assert pair.receiver.make("a", lambda: "own") == "own"


@pytest.mark.parametrize(
    "error", [EOFError("no answer"), subprocess.CalledProcessError(3, ["x"], "out"), OSError(2, "gone"), KeyError("k")]
)
def test_an_error_of_rank_0_is_one_of_its_class_on_the_other_ranks(pair: Pair, error: Exception) -> None:
    def make() -> None:
        raise error

    with pytest.raises(type(error)):
        pair.publisher.make("a", make)
    with pytest.raises(type(error), match="rank 0 failed in a: ") as raised:
        pair.receiver.wait_for("a")
    assert isinstance(raised.value, DistributedError)
    assert error_text(raised.value) == error_text(error), "the ranks have ended alike"


def test_stop_is_no_error_of_the_value(pair: Pair) -> None:
    def make() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.publisher.make("a", make)
    assert pair.sent == []
    assert pair.publisher.make("b", lambda: 1) == 1
    assert pair.sent == ["b/0"]


def test_a_cell_does_not_inherit_what_an_earlier_one_was_in(pair: Pair) -> None:
    alone = pair.publisher.detached()
    alone.__enter__()  # Left by force.
    pair.begin(2)
    pair.publisher.make("a", lambda: 1)
    assert pair.sent == ["a/0"]
    alone.__exit__(None, None, None)
    pair.publisher.make("a", lambda: 2)
    assert pair.sent == ["a/0", "a/1"]


def test_a_worker_is_not_left_alone_for_ever(pair: Pair) -> None:
    pair.receiver.note_left(1)
    with pytest.raises(LeftAloneError, match=r"rank 0 has left the cell without input\(\)"):
        pair.receiver.wait_for("input()")


def test_a_replay_passes_over_what_gives_no_value(pair: Pair) -> None:
    pair.receiver.is_replay = True
    assert pair.receiver.wait_for("%pip", is_value=False) is None
    with pytest.raises(LeftAloneError, match=r"input\(\) was run before enable_multi_gpu"):
        pair.receiver.wait_for("input()")
