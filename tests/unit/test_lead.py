"""Rank 0's decisions, which all ranks take over; which signals count, what a stop saves, how it ends a training."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from tests.helpers.board import manager_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import DivergenceError, RankTimeoutError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import GradientExchange
from unsloth_multigpu.train import lead as module
from unsloth_multigpu.train.lead import Lead, Moment, OneDecision, Preemption
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.wire.event import EventWriter, StopRequest, ask_to_stop, read_request
from unsloth_multigpu.wire.heartbeat import HeartbeatPage

CONFIG = MultiGPUConfig(timeout_s=0.05)


def leads_of(managers):
    """Two ranks of one training."""
    leads = [Lead(manager, HeartbeatPage(None, rank)) for rank, manager in enumerate(managers)]
    for lead in leads:
        lead.begin()
    return leads


@pytest.fixture
def leads():
    store = HashStore()
    return leads_of([manager_of(store, rank, 2, CONFIG) for rank in range(2)])


def test_flags_of_rank_0_are_those_of_all_ranks_and_keys_are_used_again(leads, monkeypatch):
    monkeypatch.setattr(module, "_RING", 16)
    mine, other = leads
    for number in range(100):
        assert mine.follow(Moment.STEP, number % 32, number) == number % 32
        assert other.follow(Moment.STEP, 31, number) == number % 32
    assert mine._manager.store.num_keys() == 16


def test_decision_that_is_not_there_is_waited_for_and_one_of_an_earlier_training_does_not_count(leads):
    leads[0].follow(Moment.STEP, 7, 0)
    _, other = leads_of([lead._manager for lead in leads])
    with pytest.raises(RankTimeoutError, match=r"rank 1 waited 0\.05 seconds for rank 0 to reach the end of a step"):
        other.follow(Moment.STEP, 0, 0)


def test_rank_that_has_come_to_another_point_is_told(leads):
    mine, other = leads
    mine.follow(Moment.SAVE, 0, 3)
    with pytest.raises(DivergenceError, match="After step 3 rank 1 is at a log, rank 0 at a save"):
        other.follow(Moment.LOG, 0, 3)


@pytest.mark.parametrize("asked_rank", [0, 1])
def test_signal_of_any_rank_is_heard_by_all_at_one_point(leads, asked_rank):
    leads[asked_rank].asked = lambda: signal.SIGTERM
    heard = []
    for step in range(3):  # Rank 0 is ahead, as in a training.
        for lead in leads:
            lead.follow(Moment.STEP, 0, step)
        heard.append([lead.signal_number for lead in leads])
    assert heard == [[15 * (asked_rank == 0)] * 2, [15, 15], [15, 15]]


def test_decision_behind_the_last_synchronization_of_ranks_that_step_by_themselves_is_told(caplog):
    trainer, manager = FakeTrainer(), manager_of(HashStore(), 0, 2, CONFIG)
    decision = OneDecision(trainer, manager, Lead(manager, HeartbeatPage(None, 0)), SimpleNamespace(may_stop=False))
    decision._scheduled = lambda _: 1  # Each step is logged.
    with Loop(trainer, [decision]).steering():
        trainer.steps(6, on_step=lambda step: vars(trainer.control).update(should_log=True, should_save=step == 5))
        trainer.event("on_log")
    assert trainer.saved == []
    assert caplog.messages[-1] == "control.should_save had no effect, because the training had ended"


def preemption_of(trainer, manager, events=None):
    lead = Lead(manager, HeartbeatPage(None, 0))
    return Preemption(trainer, manager, events, lead, GradientExchange(trainer, manager))


def test_supervisor_asks_the_ranks_of_one_attempt_and_the_first_to_ask_is_heard(tmp_path):
    assert read_request(tmp_path) is None
    for number, deadline_s in ((signal.SIGTERM, 7.0), (signal.SIGINT, 9.0)):
        ask_to_stop(tmp_path, StopRequest(number, deadline_s))
    assert read_request(tmp_path) == StopRequest(signal.SIGTERM, 7.0)
    assert len(list(tmp_path.iterdir())) == 1


def test_first_signal_is_kept_and_the_second_does_what_it_did_before():
    steered = preemption_of(FakeTrainer(), manager_of(None, config=MultiGPUConfig(resume="auto")))
    heard = []

    def train():
        with steered.around():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)  # At once: the same again.
            assert (steered._asked(), heard) == (signal.SIGUSR1, [])
            steered._caught = (signal.SIGUSR1, time.monotonic() - 1.0)
            os.kill(os.getpid(), signal.SIGUSR1)

    before = {n: signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    try:
        signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGUSR1)):
            train()
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("rank", "is_main", "said"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_training_that_hears_no_signal_says_so_once(caplog, rank, is_main, said):
    store = HashStore()
    handler, during = signal.getsignal(signal.SIGTERM), []

    def train():
        trainer = FakeTrainer()
        if rank:  # It follows rank 0 at the end.
            Lead(manager_of(store, 0, 2), HeartbeatPage(None, 0)).follow(Moment.END, 0, 2)
        with Loop(trainer, [preemption_of(trainer, manager_of(store, rank, 2))]).steering():
            during.append(signal.getsignal(signal.SIGTERM))
            trainer.steps(2)

    # Ray and others call train() in a thread of their worker.
    if is_main:
        train()
    else:
        with ThreadPoolExecutor() as pool:
            pool.submit(train).result()
    assert (during[0] == handler) == (not is_main)
    assert caplog.text.count("SIGTERM ends this process without a save") == said


def preemption(trainer, tmp_path, **options):
    manager = manager_of(None, config=MultiGPUConfig(**options), launcher="unsloth_multigpu")
    return preemption_of(trainer, manager, EventWriter(tmp_path, 0, 0, HeartbeatPage(None, 0)))


def ask(tmp_path, number=signal.SIGTERM):
    ask_to_stop(tmp_path, StopRequest(number, time.monotonic() + 5.0))


@pytest.mark.parametrize(
    ("strategy", "resume", "is_due", "saved"),
    [
        ("steps", "off", False, [3]),
        ("steps", "off", True, [3]),  # By the script's own schedule, and not twice.
        ("no", "off", False, []),
        ("no", "auto", False, [3]),
    ],
)
def test_stop_saves_where_saving_is_wanted_and_leaves_the_training(tmp_path, strategy, resume, is_due, saved):
    trainer = FakeTrainer(save_strategy=strategy)

    def on_step(step):
        if step == 3:
            trainer.control.should_save = is_due
            ask(tmp_path)

    loop = Loop(trainer, [preemption(trainer, tmp_path, resume=resume)])
    with pytest.raises(SystemExit) as left, loop.steering():
        trainer.steps(8, on_step=on_step)
    assert left.value.code == 128 + signal.SIGTERM
    assert (trainer.state.global_step, trainer.saved, trainer.callback_handler.callbacks) == (3, saved, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("loads_best", "saved"), [(False, [8]), (True, [])])
def test_stop_behind_the_last_step_does_not_reach_the_rest_of_the_script(tmp_path, number, loads_best, saved):
    trainer = FakeTrainer(load_best_model_at_end=loads_best)

    def train():
        with Loop(trainer, [preemption(trainer, tmp_path)]).steering():
            trainer.steps(8)
            ask(tmp_path, number)  # As in the last save.

    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        train()
    assert trainer.saved == saved


@pytest.mark.parametrize(("num_unasked", "evaluates"), [(6, False), (7, True)])
def test_stop_in_or_before_an_evaluation_saves_the_step_before_it(tmp_path, num_unasked, evaluates):
    trainer = FakeTrainer()
    steered = preemption(trainer, tmp_path)
    handed = iter([0] * num_unasked + [signal.SIGTERM] * 9)  # Asked at each step, and at the two batches behind it.
    steered._asked = lambda: next(handed)
    with pytest.raises(SystemExit), Loop(trainer, [steered]).steering():
        trainer.steps(8, num_eval_batches=2)
    assert (trainer.state.global_step, trainer.saved, trainer.control.should_evaluate) == (3, [3], evaluates)
    assert steered.cuts_off_evaluation


def test_rank_that_hears_of_a_stop_by_another_node_tells_its_supervisor(tmp_path):
    trainer = FakeTrainer()
    nodes = {"nnodes": 2, "rdzv_endpoint": "localhost:1", "rdzv_id": "a"}
    steered = preemption(trainer, tmp_path, grace_s=7.0, **nodes)
    waits_until = []

    with pytest.raises(SystemExit, match="143"), Loop(trainer, [steered]).steering():  # noqa: PT012
        # Rank 0, on another node, has decided it.
        steered.lead.asked = lambda: signal.SIGTERM * (trainer.state.global_step >= 2)
        steered._wait_for_all = waits_until.append
        trainer.steps(8)
    assert read_request(tmp_path).signal_number == signal.SIGTERM
    assert trainer.saved == [2]
    # Until the others have saved, too.
    assert waits_until == [pytest.approx(time.monotonic() + 7.0, abs=3.0)]
