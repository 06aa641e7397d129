"""Where do the ranks stop? One answer for all, whatever the order in which they look."""

import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from tests.helpers.board import manager_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.train.agreement import Agreement
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.preempt import Caught, Preemption
from unsloth_multigpu.wire.event import EventWriter
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.request import StopRequest, ask_to_stop, read_request

NUM_POINTS = 6
NOBODY = 10**6


def agreements(stores, asked):
    """One of each rank; `asked` has the signal of each, 0 = none."""
    managers = [manager_of(store, rank, len(stores)) for rank, store in enumerate(stores)]
    return [Agreement(manager, lambda rank=rank: asked[rank]) for rank, manager in enumerate(managers)]


def test_rank_ends_after_the_first_one_of_its_machine(monkeypatch):
    handlers = []
    at_exit = SimpleNamespace(register=lambda *call: handlers.append(call))
    monkeypatch.setattr("unsloth_multigpu.train.agreement.atexit", at_exit)
    ranks = agreements([HashStore()] * 2, [0, 0])
    with subprocess.Popen(["sleep", "100"]) as first:
        ranks[0]._board.publish("stop/1/left/0", str(first.pid))
        has_left = ranks[1].leave(time.monotonic() + 5.0)
        was_alive = [not has_ended() for _, has_ended, _ in handlers]
        first.kill()
    assert (has_left, was_alive) == (True, [True])
    ((wait, has_ended, deadline_s),) = handlers
    wait(has_ended, deadline_s)
    assert has_ended()
    assert ranks[0].leave(time.monotonic() + 5.0)
    assert len(handlers) == 1


def test_supervisor_asks_the_ranks_of_one_attempt_and_the_first_to_ask_is_heard(tmp_path):
    assert read_request(tmp_path, 1) is None
    for number, deadline_s in ((signal.SIGTERM, 7.0), (signal.SIGINT, 9.0)):
        ask_to_stop(tmp_path, 1, StopRequest(number, deadline_s))
    assert read_request(tmp_path, 1) == StopRequest(signal.SIGTERM, 7.0)
    assert [read_request(tmp_path, attempt) for attempt in (0, 2)] == [None, None]
    assert len(list(tmp_path.iterdir())) == 1


class TurnStore:
    """A store each of whose operations waits for its rank's turn: the orders that several processes can have."""

    def __init__(self, store, rank, turns):
        self.store, self.rank, self.turns = store, rank, turns

    def __getattr__(self, name):
        operation = getattr(self.store, name)

        def call(*arguments):
            self.turns.take(self.rank)
            return operation(*arguments)

        return call


class Turns:
    """Says whose turn it is, by `order`; once that is used up, and for ranks that have ended, anyone's."""

    def __init__(self, order, num_ranks):
        self.order, self.condition, self.ended = list(order), threading.Condition(), set()
        self.num_ranks = num_ranks

    def take(self, rank):
        with self.condition:
            while self.order and self.order[0] != rank:
                if self.order[0] in self.ended:
                    self.order.pop(0)
                    continue
                assert self.condition.wait(10.0)
            if self.order:
                self.order.pop(0)
            self.condition.notify_all()

    def end(self, rank):
        with self.condition:
            self.ended.add(rank)
            self.condition.notify_all()


@given(
    order=st.lists(st.integers(0, 1), max_size=60),
    ask_points=st.tuples(st.integers(1, NUM_POINTS), st.integers(1, 2 * NUM_POINTS)),
    num_trainings=st.integers(1, 2),
)
@settings(max_examples=150, deadline=None)
def test_ranks_stop_at_one_point(order, ask_points, num_trainings):
    """Both ranks, or only rank 0, are asked, each at a point of its own; every operation in an order of its own."""
    store, turns, stops = HashStore(), Turns(order, 2), {}
    asked = [0, 0]
    ranks = agreements([store] * 2, asked)
    for _ in range(num_trainings - 1):  # Trainings before that nobody asked to stop.
        for point in range(1, 2 * NUM_POINTS):
            assert [rank.is_reached(point) for rank in ranks] == [0, 0]
        ranks = agreements([store] * 2, asked)

    def run(rank):
        agreement = ranks[rank]
        agreement._board._store = TurnStore(store, rank, turns)
        for point in range(1, NUM_POINTS + 1):
            asked[rank] = signal.SIGTERM if point >= ask_points[rank] else 0
            if agreement.is_reached(point):
                stops[rank] = point
                break
        turns.end(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert stops.get(0) == stops.get(1)


def test_store_of_torch_is_read_after_it_is_written():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(2)]
    asked = [0, 0]
    ranks = agreements(clients, asked)
    assert [rank.is_reached(1) for rank in ranks] == [0, 0]
    asked[1] = signal.SIGUSR1
    assert ranks[1].is_reached(2) == 0
    asked[1] = 0
    assert [rank.is_reached(3 - i) for i, rank in ((1, ranks[0]), (0, ranks[0]), (0, ranks[1]))] == [0, 10, 10]
    assert not ranks[0].leave(time.monotonic() + 0.05)
    assert ranks[1].leave(time.monotonic() + 5.0)
    # A script that catches what a stop makes train() raise may train again.
    assert [rank.is_reached(4) for rank in agreements(clients, [0, 0])] == [0, 0]


def test_first_signal_is_kept_and_the_second_does_what_it_did_before():
    caught, heard = Caught(), []
    before = {n: signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    try:
        signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with caught.while_open():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)  # At once: the same again.
            assert (caught.signal_number, heard) == (signal.SIGUSR1, [])
            caught._time_s -= 1.0
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("rank", "is_main", "said"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_training_that_hears_no_signal_says_so_once(caplog, rank, is_main, said):
    # Ray and others call train() in a thread of their worker.
    manager = manager_of(HashStore(), rank, 2)
    handler = signal.getsignal(signal.SIGTERM)
    during = []

    def train():
        trainer = FakeTrainer()
        with Loop(trainer, [Preemption(trainer, manager, None, HeartbeatPage(None, 0))]).steering():
            during.append(signal.getsignal(signal.SIGTERM))
            trainer.steps(2)

    if is_main:
        train()
    else:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert (during[0] == handler) == (not is_main)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("unsloth_multigpu")]
    assert len(messages) == said
    assert all("SIGTERM ends this process without a save. Save every few steps (save_steps)" in m for m in messages)


class Saving(FakeTrainer):
    """Notes which steps it has saved."""

    def __init__(self, **args):
        super().__init__(**args)
        self.saved = []

    def _save_checkpoint(self, model, trial):
        self.saved.append(self.state.global_step)


def preemption(trainer, tmp_path, *, may_stop=lambda: True, **options):
    manager, beat = (
        manager_of(None, config=MultiGPUConfig(**options), launcher="unsloth_multigpu"),
        HeartbeatPage(None, 0),
    )
    return Preemption(trainer, manager, EventWriter(tmp_path, 0, 0, beat), beat, may_stop)


def ask(tmp_path, number=signal.SIGTERM):
    ask_to_stop(tmp_path, 0, StopRequest(number, time.monotonic() + 5.0))


def run_until_asked(steered, trainer, tmp_path, ask_step, number=signal.SIGTERM, **loop):
    def on_step(step):
        if step == ask_step:
            ask(tmp_path, number)

    with Loop(trainer, [steered]).steering():
        trainer.steps(8, on_step=on_step, **loop)


@pytest.mark.parametrize(
    ("strategy", "resume", "saved"),
    [("steps", "off", [3]), ("no", "off", []), ("no", "auto", [3]), ("epoch", "off", [3])],
)
def test_stop_saves_where_saving_is_wanted_and_leaves_the_training(tmp_path, strategy, resume, saved):
    trainer = Saving(save_strategy=strategy)
    with pytest.raises(SystemExit) as left:
        run_until_asked(preemption(trainer, tmp_path, resume=resume), trainer, tmp_path, 3)
    assert left.value.code == 128 + signal.SIGTERM
    assert (trainer.state.global_step, trainer.saved, trainer.callback_handler.callbacks) == (3, saved, [])


def test_sigint_is_a_keyboard_interrupt(tmp_path):
    trainer = Saving()
    with pytest.raises(KeyboardInterrupt):
        run_until_asked(preemption(trainer, tmp_path), trainer, tmp_path, 1, number=signal.SIGINT)


def test_stop_in_an_evaluation_saves_the_step_before_it(tmp_path):
    trainer = Saving()
    with pytest.raises(SystemExit):
        run_until_asked(preemption(trainer, tmp_path), trainer, tmp_path, 3, num_eval_batches=4)
    assert (trainer.state.global_step, trainer.saved) == (3, [3])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("loads_best", "saved"), [(False, [8]), (True, [])])
def test_stop_behind_the_last_step_does_not_reach_the_rest_of_the_script(tmp_path, number, loads_best, saved):
    trainer = Saving(load_best_model_at_end=loads_best)

    def train():
        with Loop(trainer, [preemption(trainer, tmp_path)]).steering():
            trainer.steps(8)
            ask(tmp_path, number)  # As in the last save.

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        train()
    assert trainer.saved == saved


def test_no_evaluation_takes_the_time_that_is_left(tmp_path):
    trainer = Saving()
    steered = preemption(trainer, tmp_path)

    def agree_on_step_3(step):
        is_reached = lambda point: signal.SIGTERM * (point >= 3 << 20)  # noqa: E731
        steered._agreement = SimpleNamespace(is_reached=is_reached, leave=lambda deadline_s: True)

    with pytest.raises(SystemExit), Loop(trainer, [steered]).steering():
        trainer.steps(8, num_eval_batches=1, on_step=agree_on_step_3)
    assert (trainer.state.global_step, trainer.saved, trainer.control.should_evaluate) == (3, [3], False)


def test_batches_of_an_evaluation_are_counted_from_its_step(tmp_path):
    trainer = Saving()
    steered = preemption(trainer, tmp_path)
    points = []

    def note_points(step):
        is_reached = lambda point: points.append(point) or 0  # noqa: E731
        steered._agreement = SimpleNamespace(is_reached=is_reached, leave=lambda deadline_s: True)

    with Loop(trainer, [steered]).steering():
        trainer.steps(2, num_eval_batches=2, on_step=note_points)
    assert points == [(step << 20) + batch for step in (1, 2) for batch in (0, 1, 2)] + [(2 << 20) + 3, (2 << 20) + 4]


def test_ranks_with_steps_of_their_own_stop_where_they_meet(tmp_path):
    trainer = Saving()
    steered = preemption(trainer, tmp_path, may_stop=lambda: trainer.state.global_step % 3 == 0)
    with pytest.raises(SystemExit):
        run_until_asked(steered, trainer, tmp_path, 2)
    assert trainer.saved == [3]


def test_step_that_is_saved_already_is_not_saved_again(tmp_path):
    trainer = Saving()

    def on_step(step):
        if step == 8:  # By the script's own schedule.
            trainer.control.should_save = True
            ask(tmp_path)

    with pytest.raises(SystemExit), Loop(trainer, [preemption(trainer, tmp_path)]).steering():
        trainer.steps(8, on_step=on_step)
    assert trainer.saved == [8]


def test_training_that_nobody_asks_to_stop_is_left_alone(tmp_path):
    trainer = Saving()
    run_until_asked(preemption(trainer, tmp_path), trainer, tmp_path, NOBODY)
    assert (trainer.state.global_step, trainer.saved) == (8, [])


def test_rank_that_hears_of_a_stop_by_another_node_tells_its_supervisor(tmp_path):
    trainer = Saving()
    nodes = {"nnodes": "2", "rdzv_endpoint": "localhost:1", "rdzv_id": "a"}
    steered = preemption(trainer, tmp_path, grace_s=7.0, **nodes)
    waits_until = []

    def train():
        with Loop(trainer, [steered]).steering():
            # Another node's ranks have agreed with this one through the store.
            steered._agreement = SimpleNamespace(
                is_reached=lambda point: signal.SIGTERM * (point >= 2 << 20), leave=waits_until.append
            )
            trainer.steps(8)

    with pytest.raises(SystemExit, match="143"):
        train()
    assert read_request(tmp_path, 0).signal_number == signal.SIGTERM
    assert trainer.saved == [2]
    # Until the others have saved, too.
    assert waits_until == [pytest.approx(time.monotonic() + 7.0, abs=3.0)]
