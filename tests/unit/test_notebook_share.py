"""What ranks of a notebook share: cells of some ranks, values that rank 0 makes alone, and where the line is met."""

import subprocess
from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError
from IPython.utils.text import SList

from unsloth_multigpu.errors import ConfigError, DistributedError, SetupError
from unsloth_multigpu.notebook.cell_program import KernelProgram, ReplayedLineError, WorkerProgram
from unsloth_multigpu.notebook.display import RankMagics
from unsloth_multigpu.notebook.kernel import error_text, names_broken_group
from unsloth_multigpu.notebook.kernel_share import LeftAloneError, Publisher, Receiver, is_rank_0_magic, read_ranks
from unsloth_multigpu.notebook.worker import WorkerShell


@pytest.mark.parametrize(
    ("kind", "name", "module", "is_alone"),
    [
        ("line", "pip", "IPython.core.magics.packaging", True),
        ("line", "cd", "IPython.core.magics.osm", False),
        ("line", "sx", "IPython.core.magics.osm", False),
        ("line", "timeit", "IPython.core.magics.execution", True),
        ("line", "named_by_the_user", "IPython.core.alias", True),
        ("cell", "python3", "IPython.core.magics.script", True),
        ("cell", "capture", "IPython.core.magics.execution", False),
        ("line", "ofthefrontend", "google.colab._magics", True),
        ("line", "ofthefrontend", "ipykernel.zmqshell", True),
        ("line", "unknown", None, True),
        ("cell", "mine", "__main__", False),
    ],
)
def test_magics_that_rank_0_runs_alone(kind, name, module, is_alone):
    magic = module and SimpleNamespace(__module__=module)
    assert is_rank_0_magic(kind, name, magic) is is_alone


def test_ranks_are_read():
    assert read_ranks(" 1 ", 2) == {1}
    assert read_ranks("0, 2", 3) == {0, 2}
    assert read_ranks("all", 3) == {0, 1, 2}
    for wrong in ("", "2", "-1", "0,", "x", "0 1"):
        with pytest.raises(UsageError, match=r"expected 0 \.\. 1"):
            read_ranks(wrong, 2)


def test_a_broken_group_is_known_by_its_words():
    assert names_broken_group(RuntimeError("[gloo/transport] Connection closed by peer [127.0.0.1]:1"))
    assert not names_broken_group(ValueError("3"))


class Pair:
    """A kernel and a worker of three ranks that hear each other at once, in cell 1."""

    def __init__(self):
        cell = SimpleNamespace(number=1, stop_s=None, is_partial=False)
        self.kernel = SimpleNamespace(current=cell, send=self.send, workers=[None, None])
        self.publisher, self.receiver = Publisher(self.kernel), Receiver(lambda *_, **__: None)
        self.receiver.enter(1, is_replay=False)

    def send(self, _kind, **fields):
        self.receiver.put(fields)


@pytest.fixture
def pair():
    return Pair()


@pytest.mark.parametrize(("value", "plain"), [(SList("ab"), ["a", "b"]), (3, 3), ("text", "text"), ({1}, None)])
def test_what_is_sent_is_plain_and_what_is_kept_is_not(pair, value, plain):
    assert pair.publisher.share("a", lambda: value) is value
    received = pair.receiver.share("a", lambda: 1 / 0)
    assert (received, type(received)) == (plain, type(plain))
    with pair.receiver.detached(is_apart=True):
        assert pair.receiver.share("a", lambda: "own") == "own"


@pytest.mark.parametrize(
    "error", [EOFError("no answer"), subprocess.CalledProcessError(3, ["x"], "out"), OSError(2, "gone"), KeyError("k")]
)
def test_an_error_of_rank_0_is_one_of_its_class_on_the_other_ranks(pair, error):
    def make():
        raise error

    with pytest.raises(type(error)):
        pair.publisher.share("a", make)
    with pytest.raises(type(error), match="rank 0 failed in a: ") as raised:
        pair.receiver.wait_for("a")
    assert isinstance(raised.value, DistributedError)
    assert error_text(raised.value) == error_text(error), "the ranks have ended alike"


def test_a_value_that_was_made_before_the_worker_existed_is_not_known(pair):
    pair.receiver.is_replay = True
    assert pair.receiver.share("%pip install x", lambda: 1 / 0, is_value=False) is None
    with pytest.raises(LeftAloneError, match=r"input\(\) was run before .*\n.*enable_multi_gpu\(\) in the first cell"):
        pair.receiver.share("input()", lambda: 1 / 0)


def test_a_worker_is_not_left_alone_for_ever(pair):
    pair.receiver.note_left(1)
    with pytest.raises(LeftAloneError, match=r"rank 0 has left the cell without input\(\)"):
        pair.receiver.wait_for("input()")


def test_a_worker_knows_where_rank_0_is(pair):
    worker, receiver = WorkerProgram(pair.receiver, {}), pair.receiver
    manager = SimpleNamespace()
    worker.prepare(manager)
    assert not manager.is_abandoned()
    receiver.note_left(1)
    assert manager.is_abandoned()
    receiver.cell_number = 0
    assert not manager.is_abandoned(), "no cell runs"


@pytest.mark.parametrize(("ranks", "is_apart"), [("all", False), ("0,1", True)])
def test_a_cell_that_not_all_ranks_run_is_apart(pair, monkeypatch, ranks, is_apart):
    def run_cell(_source):
        seen.append((pair.publisher.is_apart, pair.receiver.is_apart))
        return SimpleNamespace(raise_error=lambda: None)

    seen = []
    monkeypatch.setattr("os.environ", {"RANK": "1", "WORLD_SIZE": "3"})
    RankMagics(SimpleNamespace(run_cell=run_cell), pair.kernel, pair.publisher, None).rank(ranks, "")
    WorkerShell._rank(SimpleNamespace(_receiver=pair.receiver, run_cell=run_cell), ranks, "")
    assert seen == [(is_apart, False), (False, is_apart)]
    assert pair.kernel.current.is_partial is is_apart


def test_the_line_waits_for_rank_0_in_its_cell_and_is_refused_in_earlier_ones(pair):
    worker, receiver = WorkerProgram(pair.receiver, {}), pair.receiver
    worker.meet_at_line()
    receiver.is_replay = True
    reached = []
    worker.await_rank_0 = lambda: reached.append("the line")
    worker.meet_at_line()
    assert reached == ["the line"]
    worker.await_rank_0 = None
    # Whatever the cell catches there: rank 0's call raised one of these.
    for kind in (ReplayedLineError, SetupError, ConfigError):
        with pytest.raises(kind, match="repeated in a later cell"):
            worker.meet_at_line()


def test_rank_0_trains_in_a_cell_of_all_ranks_only():
    kernel = SimpleNamespace(current=None)
    panel = SimpleNamespace(begin=lambda _is_in_cell: None)
    program = KernelProgram(kernel, Publisher(kernel), panel)
    with pytest.raises(SetupError, match="outside a cell of all ranks"):
        program.begin_training()
    kernel.current = object()
    assert program.begin_training() == 0
