"""The words by which rank 0 leads and the claims of ranks that step by themselves; what an overruled rank is told."""

import pytest
from torch.distributed import HashStore

from tests.helpers.board import manager_of
from unsloth_multigpu.errors import DistributedError, DivergenceError, RankTimeoutError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.train import lead as module
from unsloth_multigpu.train.control import Overruled
from unsloth_multigpu.train.lead import PASSED, WAIT, Lead, Moment
from unsloth_multigpu.wire.heartbeat import HeartbeatPage


@pytest.fixture
def leads():
    """Two ranks of one training."""
    store = HashStore()
    config = MultiGPUConfig(timeout_s=0.05)
    pair = [Lead(manager_of(store, rank, 2, config), HeartbeatPage(None, rank)) for rank in range(2)]
    begin(pair)
    return pair


def begin(leads):
    trainings = []
    for lead in leads:
        # Rank 0's number is gathered by both.
        lead._manager.gather_int64 = lambda values: trainings.append(values) or [trainings[0]]
        lead.begin()


def test_words_of_rank_0_are_those_of_all_ranks_and_take_the_same_keys_again(leads, monkeypatch):
    monkeypatch.setattr(module, "_RING", 16)
    mine, other = leads
    for number in range(100):
        assert mine.follow(Moment.STEP, number % 32, number) == number % 32
        assert other.follow(Moment.STEP, 31, number) == number % 32
    assert mine._manager.store.num_keys() == 17  # With the number of trainings.


def test_word_that_is_not_there_is_waited_for_and_one_of_an_earlier_training_does_not_count(leads):
    mine, other = leads
    mine.follow(Moment.STEP, 7, 0)
    mine.claim(2, 7)
    begin(leads)
    with pytest.raises(RankTimeoutError, match=r"rank 1 waited 0\.05 seconds for what rank 0's callbacks decide after"):
        other.follow(Moment.LOG, 0, 3)
    assert other.claim(2, PASSED) == PASSED


def test_rank_that_has_come_to_another_place_is_told(leads):
    mine, other = leads
    mine.follow(Moment.SAVE, 0, 3)
    with pytest.raises(DivergenceError, match="step 3 rank 1 has come to the callbacks of a log, rank 0 to those"):
        other.follow(Moment.LOG, 0, 3)


def test_rank_that_is_a_whole_ring_behind_is_told(leads, monkeypatch):
    monkeypatch.setattr(module, "_RING", 2)
    mine, other = leads
    for number in range(3):
        mine.follow(Moment.STEP, 0, number)
        mine.claim(number, 4)
    with pytest.raises(DistributedError, match="rank 0 is 2 decisions ahead of this rank"):
        other.follow(Moment.STEP, 0, 0)
    assert [other.claim(number, 0) for number in range(3)] == [PASSED, 4, 4]


def test_a_claim_belongs_to_the_first_rank(leads):
    mine, other = leads
    assert other.claim(2, PASSED) == PASSED
    assert mine.claim(2, 4) == PASSED
    assert mine.claim(4, WAIT) == WAIT
    assert other.claim(4, PASSED) == WAIT
    with pytest.raises(RankTimeoutError):
        other.wait_for_claim(4, Moment.STEP, 2)
    mine.settle(4, 5)
    assert other.wait_for_claim(4, Moment.STEP, 2) == 5


def test_claim_of_another_rank_that_comes_in_between_counts(leads):
    mine, other = leads
    mine.claim(0, 3)
    read = mine._manager.read

    def read_late(key):
        before = read(key)
        other.claim(module._RING, PASSED)
        return before

    mine._manager.read = read_late
    assert mine.claim(module._RING, 9) == PASSED


def test_flags_that_rank_0_sets_within_ten_steps_are_no_reason_to_warn(caplog):
    save, stop = 4, 16
    note = Overruled(1)
    note.note(3, save, 0)
    note.note(4, 0, save)
    note.note(8, save, 0)
    note.tell(8)
    assert not caplog.records
    note.note(20, stop, 0)
    note.note(25, stop, 0)
    assert not caplog.records
    note.note(30, stop, 0)
    note.note(60, stop, 0)
    note.tell(60)
    (record,) = caplog.records
    assert "rank 1 has set control.should_training_stop after step 20" in record.getMessage()
