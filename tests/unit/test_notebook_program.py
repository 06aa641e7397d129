"""What a session asks about the code of its process: a script's answers, a kernel's and a worker's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.logs import Console
from unsloth_multigpu.notebook.cell_program import KernelProgram, ReplayedLineError, WorkerProgram
from unsloth_multigpu.notebook.value import LeftAloneError, Publisher, Receiver
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.session import Session
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import RankIdentity

RANK_1 = RankIdentity(1, 1, 2, 2, "notebook")


def opener(
    config: MultiGPUConfig, identity: RankIdentity, console: Console, context: RunContext, program: Any
) -> Session:
    """Stands for `open_session`: no process becomes a rank."""
    return Session(config, identity, console, context, program=program)


@pytest.fixture
def receiver() -> Receiver:
    receiver = Receiver(lambda *_, **__: None)
    receiver.is_replay = False
    receiver.cell_number = 1
    return receiver


@pytest.fixture
def worker(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> WorkerProgram:
    monkeypatch.setattr("unsloth_multigpu.notebook.cell_program.open_session", opener)
    return WorkerProgram(receiver)


def test_a_training_that_was_cut_off_is_the_same_when_its_cell_runs_again(worker: WorkerProgram) -> None:
    first, again = worker.begin_training(), worker.begin_training()
    worker.end_training()
    assert (first, again, worker.begin_training()) == (0, 0, 1)


def test_trainings_are_known_while_the_session_is_open(worker: WorkerProgram) -> None:
    assert (worker.session, worker.trainings) == (None, None)
    assert worker.order() == {"sends_weights": False, "num_trainings": (0, 0)}
    session = worker.open_session(MultiGPUConfig(), RANK_1, Console(), RunContext())
    assert worker.session is session
    worker.begin_training()
    worker.end_training()
    worker.begin_training()
    assert worker.order() == {"sends_weights": False, "num_trainings": (2, 1)}
    session.on_close.pop_all()
    session.close()
    assert (worker.session, worker.trainings) == (None, None)


def test_closing_a_workers_session_waits_for_rank_0(worker: WorkerProgram, receiver: Receiver) -> None:
    session = worker.open_session(MultiGPUConfig(), RANK_1, Console(), RunContext())
    receiver.note_left(1)
    with pytest.raises(LeftAloneError, match=r"rank 0 has left the cell without disable_multi_gpu\(\)"):
        session.close()
    session.console.close()


def test_a_session_that_could_not_be_opened_is_none(worker: WorkerProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Session:
        raise SetupError("no card", hint="Look.")

    monkeypatch.setattr("unsloth_multigpu.notebook.cell_program.open_session", fail)
    with pytest.raises(SetupError):
        worker.open_session(MultiGPUConfig(), RANK_1, Console(), RunContext())
    assert worker.session is None


def test_a_worker_knows_where_rank_0_is(worker: WorkerProgram, receiver: Receiver) -> None:
    manager: Any = SimpleNamespace()
    worker.prepare(manager)
    assert not manager.is_abandoned()
    receiver.note_left(1)
    assert manager.is_abandoned()
    receiver.cell_number = 0
    assert not manager.is_abandoned(), "no cell runs"
    with receiver.detached(is_apart=True):
        assert not worker.can_exchange()


def test_the_line_of_an_earlier_cell_is_refused(worker: WorkerProgram, receiver: Receiver) -> None:
    worker.refuse_replay()
    receiver.is_replay = True
    # Whatever the cell catches there: rank 0's call raised one of these.
    for kind in (ReplayedLineError, SetupError, ConfigError):
        with pytest.raises(kind, match="repeated in a later cell"):
            worker.refuse_replay()


def test_rank_0_trains_in_a_cell_of_all_ranks_only() -> None:
    kernel: Any = SimpleNamespace(current=None)
    panel: Any = SimpleNamespace(begin=lambda _is_in_cell: None)
    program = KernelProgram(kernel, Publisher(kernel), panel)
    with pytest.raises(SetupError, match="outside a cell of all ranks"):
        program.begin_training()
    kernel.current = object()
    assert program.begin_training() == 0
