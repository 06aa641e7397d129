"""Rank 0's decisions, which all ranks take over, and what becomes of those of other ranks."""

import signal

import pytest
from torch.distributed import HashStore

from tests.helpers.board import manager_of
from unsloth_multigpu.errors import DivergenceError, RankTimeoutError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.train import lead as module
from unsloth_multigpu.train.lead import Lead, Moment
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
