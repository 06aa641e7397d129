"""The words by which ranks agree, on a page and in a store; what a rank above 0 is told of its flags."""

import pytest
from torch.distributed import HashStore

from unsloth_multigpu.train.control import Overruled
from unsloth_multigpu.train.decision import PASSED, WAIT, PageBoard, StoreBoard, wait_for_word


@pytest.fixture(params=["page", "store"])
def boards(request, tmp_path):
    """Two ranks' views of the same words."""
    store = HashStore()
    pair = [PageBoard(tmp_path) if request.param == "page" else StoreBoard(store) for _ in range(2)]
    yield pair
    for board in pair:
        board.close()


def begin(boards):
    training = boards[0].next_training()
    for board in boards:
        board.begin(training)


def test_words_of_rank_0_are_read_in_their_place(boards):
    mine, other = boards
    begin(boards)
    for number in range(5000):
        assert other.get(number) is None
        mine.put(number, number % 32)
        assert other.get(number) == number % 32


def test_words_of_an_earlier_training_count_as_not_written(boards):
    mine, other = boards
    begin(boards)
    mine.put(0, 7)
    mine.claim(2, 7)
    begin(boards)
    assert other.get(0) is None
    assert other.look(2) is None
    assert other.claim(2, PASSED) == PASSED


def test_a_claim_belongs_to_the_first_rank(boards):
    mine, other = boards
    begin(boards)
    assert other.claim(2, PASSED) == PASSED
    assert mine.claim(2, 4) == PASSED
    assert mine.claim(4, WAIT) == WAIT
    assert other.claim(4, PASSED) == WAIT
    mine.settle(4, 5)
    assert other.look(4) == 5
    looks = iter([None, WAIT, 3])
    turns = []
    assert wait_for_word(lambda: next(looks), 0.001, lambda: turns.append(1)) == 3
    assert len(turns) == 2


def test_flags_that_rank_0_sets_within_ten_steps_are_no_reason_to_warn(caplog):
    save, stop = 4, 16
    note = Overruled(1)
    note.note(3, save, 0)
    note.note(4, 0, save)
    note.note(8, save, 0)
    note.end()
    assert not caplog.records
    note.note(20, stop, 0)
    note.note(25, stop, 0)
    assert not caplog.records
    note.note(30, stop, 0)
    note.note(60, stop, 0)
    note.end()
    (record,) = caplog.records
    assert "rank 1 has set control.should_training_stop after step 20" in record.getMessage()
