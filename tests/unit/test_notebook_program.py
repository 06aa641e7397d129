"""What a session asks about the code of its process: a script's answers, a kernel's and a worker's."""

from types import SimpleNamespace

import pytest

from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.notebook.cell_program import KernelProgram, ReplayedLineError, WorkerProgram
from unsloth_multigpu.notebook.kernel_share import Publisher, Receiver


@pytest.fixture
def receiver():
    receiver = Receiver(lambda *_, **__: None)
    receiver.enter(1, is_replay=False)
    return receiver


@pytest.fixture
def worker(receiver):
    return WorkerProgram(receiver)


def test_a_worker_knows_where_rank_0_is(worker, receiver):
    manager = SimpleNamespace()
    worker.prepare(manager)
    assert not manager.is_abandoned()
    receiver.note_left(1)
    assert manager.is_abandoned()
    receiver.cell_number = 0
    assert not manager.is_abandoned(), "no cell runs"
    with receiver.detached(is_apart=True):
        assert not worker.can_exchange()


def test_the_line_waits_for_rank_0_in_its_cell_and_is_refused_in_earlier_ones(worker, receiver):
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
