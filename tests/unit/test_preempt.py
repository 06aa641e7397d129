"""Where do the ranks stop? One answer for all, whatever the order in which they look."""

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.train.agreement import PageAgreement, StoreAgreement
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.train.preempt import Caught, Preemption
from unsloth_multigpu.wire.beat import BeatPage
from unsloth_multigpu.wire.control import ControlPage
from unsloth_multigpu.wire.identity import RankIdentity

NUM_POINTS = 6
NOBODY = 10**6


def stops_of(ranks, order, ask_at, ask):
    """Lets ranks go on in `order`, each a point at a time, and asks before turn `ask_at`: where each rank stops."""
    points, stops = [0] * len(ranks), [None] * len(ranks)
    # What a rank has not done by then it does after the others.
    for turn, rank in enumerate([*order, *sorted([*range(len(ranks))] * NUM_POINTS)]):
        if turn == ask_at:
            ask()
        if stops[rank] is None and points[rank] < NUM_POINTS:
            points[rank] += 1
            if ranks[rank](points[rank]):
                stops[rank] = points[rank]
    return stops


@given(order=st.lists(st.integers(0, 2), max_size=18), ask_at=st.integers(0, 20), num_trainings=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_ranks_of_a_page_stop_at_one_point(tmp_path_factory, order, ask_at, num_trainings):
    page = ControlPage(tmp_path_factory.getbasetemp(), 3)
    page.reset()
    for number in range(num_trainings):
        ranks = [PageAgreement(page, rank) for rank in range(3)]
        if number < num_trainings - 1:  # Trainings before that nobody asked to stop.
            assert stops_of([lambda p, r=r: r.is_reached(p) for r in ranks], order, NOBODY, None) == [None] * 3
    stops = stops_of([lambda p, r=r: r.is_reached(p) for r in ranks], order, ask_at, lambda: page.ask(15, 0.0))
    page.close()
    assert len(set(stops)) == 1
    if ask_at == 0:
        assert stops == [2, 2, 2]


def test_point_is_said_and_looked_for_under_the_lock(tmp_path):
    class Watched(ControlPage):
        is_locked = False

        @contextmanager
        def lock(self):
            with super().lock():
                self.is_locked = True
                yield
                self.is_locked = False

        def set_point(self, local_rank, point):
            assert self.is_locked
            super().set_point(local_rank, point)

        @property
        def signal(self):
            assert self.is_locked
            return super().signal

    page = Watched(tmp_path, 1)
    assert PageAgreement(page, 0).is_reached(1) == 0
    page.close()


def test_rank_ends_after_the_first_one_of_its_machine(tmp_path, monkeypatch):
    handlers = []
    at_exit = SimpleNamespace(register=lambda *call: handlers.append(call))
    monkeypatch.setattr("unsloth_multigpu.train.agreement.atexit", at_exit)
    page = ControlPage(tmp_path, 2)
    with subprocess.Popen(["sleep", "100"]) as first:
        page.set_left(0, first.pid)
        has_left = PageAgreement(page, 1).leave(time.monotonic() + 5.0)
        was_alive = [not has_ended() for _, has_ended, _ in handlers]
        first.kill()
    assert (has_left, was_alive) == (True, [True])
    ((wait, has_ended, deadline_s),) = handlers
    wait(has_ended, deadline_s)
    assert has_ended()
    assert PageAgreement(page, 0).leave(time.monotonic() + 5.0)
    assert len(handlers) == 1
    page.close()


def test_stop_that_nobody_reached_holds_at_the_first_point_of_the_next_training(tmp_path):
    page = ControlPage(tmp_path, 2)
    first = [PageAgreement(page, rank) for rank in range(2)]
    assert first[0].is_reached(9) == 0
    page.ask(signal.SIGTERM, 7.0)
    page.ask(signal.SIGINT, 9.0)  # The first to ask is heard.
    assert (page.signal, page.deadline_s) == (signal.SIGTERM, 7.0)
    assert first[1].is_reached(9) == 0
    second = [PageAgreement(page, rank) for rank in range(2)]
    assert [rank.is_reached(1) for rank in second] == [signal.SIGTERM] * 2
    page.reset()
    assert [rank.is_reached(2) for rank in second] == [0, 0]
    page.close()


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
)
@settings(max_examples=150, deadline=None)
def test_ranks_of_a_store_stop_at_one_point(order, ask_points):
    """Both ranks, or only rank 0, are asked, each at a point of its own; every operation in an order of its own."""
    store, turns, stops = HashStore(), Turns(order, 2), {}
    asked = [0, 0]
    ranks = [StoreAgreement(store, rank, 2, lambda rank=rank: asked[rank]) for rank in range(2)]

    def run(rank):
        agreement = ranks[rank]
        agreement._store = TurnStore(store, rank, turns)
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
    ranks = [StoreAgreement(client, rank, 2, lambda rank=rank: asked[rank]) for rank, client in enumerate(clients)]
    assert [rank.is_reached(1) for rank in ranks] == [0, 0]
    asked[1] = signal.SIGUSR1
    assert ranks[1].is_reached(2) == 0
    asked[1] = 0
    assert [rank.is_reached(3 - i) for i, rank in ((1, ranks[0]), (0, ranks[0]), (0, ranks[1]))] == [0, 10, 10]
    assert not ranks[0].leave(time.monotonic() + 0.05)
    assert ranks[1].leave(time.monotonic() + 5.0)
    # A script that catches what a stop makes train() raise may train again.
    again = [StoreAgreement(client, rank, 2, lambda: 0) for rank, client in enumerate(clients)]
    assert [rank.is_reached(4) for rank in again] == [0, 0]


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
    store = HashStore()
    manager = SimpleNamespace(identity=RankIdentity(rank, rank, 2, 2, "torchrun"), config=MultiGPUConfig(), store=store)
    handler = signal.getsignal(signal.SIGTERM)
    during = []

    def train():
        trainer = FakeTrainer()
        with Loop(trainer, [Preemption(trainer, manager, None, None, BeatPage(None, 0))]).steering():
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


def preemption(trainer, tmp_path, *, local_world_size=1, may_stop=lambda: True, **options):
    identity = RankIdentity(0, 0, 1, local_world_size, "unsloth_multigpu")
    manager = SimpleNamespace(identity=identity, config=MultiGPUConfig(**options), store=None)
    return Preemption(trainer, manager, None, str(tmp_path), BeatPage(None, 0), may_stop)


@pytest.fixture
def page(tmp_path):
    page = ControlPage(tmp_path, 1)
    yield page
    page.close()


def run_until_asked(steered, trainer, page, ask_step, number=signal.SIGTERM, **loop):
    def on_step(step):
        if step == ask_step:
            page.ask(number, time.monotonic() + 5.0)

    with Loop(trainer, [steered]).steering():
        trainer.steps(8, on_step=on_step, **loop)


@pytest.mark.parametrize(
    ("strategy", "resume", "saved"),
    [("steps", "off", [4]), ("no", "off", []), ("no", "auto", [4]), ("epoch", "off", [4])],
)
def test_stop_saves_where_saving_is_wanted_and_leaves_the_training(tmp_path, page, strategy, resume, saved):
    trainer = Saving(save_strategy=strategy)
    with pytest.raises(SystemExit) as left:
        run_until_asked(preemption(trainer, tmp_path, resume=resume), trainer, page, 3)
    assert left.value.code == 128 + signal.SIGTERM
    # Asked in step 3, agreed at its end, done at the end of step 4.
    assert (trainer.state.global_step, trainer.saved, trainer.callback_handler.callbacks) == (4, saved, [])


def test_sigint_is_a_keyboard_interrupt(tmp_path, page):
    trainer = Saving()
    with pytest.raises(KeyboardInterrupt):
        run_until_asked(preemption(trainer, tmp_path), trainer, page, 1, number=signal.SIGINT)


def test_stop_in_an_evaluation_saves_the_step_before_it(tmp_path, page):
    trainer = Saving()
    with pytest.raises(SystemExit):
        run_until_asked(preemption(trainer, tmp_path), trainer, page, 3, num_eval_batches=4)
    assert (trainer.state.global_step, trainer.saved) == (3, [3])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_behind_the_last_step_does_not_reach_the_rest_of_the_script(tmp_path, page, number):
    trainer = Saving()

    def train():
        with Loop(trainer, [preemption(trainer, tmp_path)]).steering():
            trainer.steps(8)
            page.ask(number, time.monotonic() + 5.0)  # As in the last save.

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        train()
    assert trainer.saved == [8]


def test_no_evaluation_takes_the_time_that_is_left(tmp_path, page):
    trainer = Saving()
    steered = preemption(trainer, tmp_path)

    def agree_on_step_3(step):
        is_reached = lambda point: signal.SIGTERM * (point >= 3 << 20)  # noqa: E731
        steered._agreement = SimpleNamespace(is_reached=is_reached, leave=lambda deadline_s: True)

    with pytest.raises(SystemExit), Loop(trainer, [steered]).steering():
        trainer.steps(8, num_eval_batches=1, on_step=agree_on_step_3)
    assert (trainer.state.global_step, trainer.saved, trainer.control.should_evaluate) == (3, [3], False)


def test_batches_of_an_evaluation_are_counted_from_its_step(tmp_path, page):
    trainer = Saving()
    steered = preemption(trainer, tmp_path)
    points = []

    def note_points(step):
        is_reached = lambda point: points.append(point) or 0  # noqa: E731
        steered._agreement = SimpleNamespace(is_reached=is_reached, leave=lambda deadline_s: True)

    with Loop(trainer, [steered]).steering():
        trainer.steps(2, num_eval_batches=2, on_step=note_points)
    assert points == [(step << 20) + batch for step in (1, 2) for batch in (0, 1, 2)] + [(2 << 20) + 3, (2 << 20) + 4]


def test_ranks_with_steps_of_their_own_stop_where_they_meet(tmp_path, page):
    trainer = Saving()
    steered = preemption(trainer, tmp_path, may_stop=lambda: trainer.state.global_step % 3 == 0)
    with pytest.raises(SystemExit):
        run_until_asked(steered, trainer, page, 2)
    assert trainer.saved == [6]


@pytest.mark.parametrize(("loads_best", "saved"), [(False, [8]), (True, [])])
def test_asked_in_the_last_step_the_script_behind_train_is_not_begun(tmp_path, page, loads_best, saved):
    trainer = Saving(load_best_model_at_end=loads_best)
    with pytest.raises(SystemExit):
        run_until_asked(preemption(trainer, tmp_path), trainer, page, 8)
    assert trainer.saved == saved


def test_step_that_is_saved_already_is_not_saved_again(tmp_path, page):
    trainer = Saving()

    def on_step(step):
        if step == 8:  # By the script's own schedule.
            trainer.control.should_save = True
            page.ask(signal.SIGTERM, time.monotonic() + 5.0)

    with pytest.raises(SystemExit), Loop(trainer, [preemption(trainer, tmp_path)]).steering():
        trainer.steps(8, on_step=on_step)
    assert trainer.saved == [8]


def test_training_that_nobody_asks_to_stop_is_left_alone(tmp_path, page):
    trainer = Saving()
    run_until_asked(preemption(trainer, tmp_path), trainer, page, NOBODY)
    assert (trainer.state.global_step, trainer.saved) == (8, [])


def test_rank_that_hears_of_a_stop_by_another_node_tells_its_supervisor(tmp_path, page):
    trainer = Saving()
    nodes = {"nnodes": "2", "rdzv_endpoint": "localhost:1", "rdzv_id": "a"}
    steered = preemption(trainer, tmp_path, local_world_size=2, grace_s=7.0, **nodes)
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
    assert page.signal == signal.SIGTERM
    assert trainer.saved == [2]
    # Until the others have saved, too.
    assert waits_until == [pytest.approx(time.monotonic() + 7.0, abs=3.0)]
