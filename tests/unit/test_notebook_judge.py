"""What a notebook's kernel does when ranks do not end a cell together: every action and its time."""

import pytest

from unsloth_multigpu.notebook.judge import Action, find_divergence, next_actions
from unsloth_multigpu.notebook.kernel import Cell

NEVER = 10_000.0


def first_time(action, limit_s=60.0, *, pending=frozenset({1}), **fields):
    """When an action is due, in tenths of a second from the start; those before it are taken when they are due."""
    cell = Cell(1, **{"main_since_s": 0.0, **fields})
    for tick in range(int(limit_s * 20) + 1):
        now_s = tick / 20
        due = next_actions(cell, now_s, pending)
        if action in due:
            return now_s
        cell.done.update(dict.fromkeys(due, now_s))
    return NEVER


@pytest.mark.parametrize("main", ["runs", "unwinds", "left"])
def test_cell_that_goes_well_is_left_alone(main):
    assert all(first_time(action, main=main) == NEVER for action in Action)


@pytest.mark.parametrize(
    ("failure", "raised_s", "aborted_s"),
    [("raised", 1.4, 1.9), ("died", 0.25, 0.75), ("hung", 0.0, 0.5), ("diverged", 0.0, 0.1)],
)
def test_failure_of_another_rank_ends_the_kernels_part(failure, raised_s, aborted_s):
    assert first_time(Action.RAISE, failure=failure) == pytest.approx(raised_s, abs=0.051)
    assert first_time(Action.ABORT, failure=failure) == pytest.approx(aborted_s, abs=0.051)
    assert first_time(Action.ASK, failure=failure) == NEVER


def test_stop_reaches_the_workers_at_once_and_a_stuck_main_thread_after_a_second():
    assert first_time(Action.PASS_STOP, stop_s=0.0) == 0.0
    assert first_time(Action.PASS_STOP, stop_s=0.0, main="left") == 0.0
    assert first_time(Action.PASS_STOP, stop_s=0.0, pending=frozenset()) == NEVER
    assert first_time(Action.ABORT, stop_s=0.0) == 1.0
    assert first_time(Action.RAISE, stop_s=0.0) == NEVER


def test_stop_cancels_a_cell_that_awaits():
    assert first_time(Action.RAISE, stop_s=0.0, task=object()) == pytest.approx(0.2)


def test_stop_that_came_while_nothing_may_be_raised_is_raised_afterwards():
    assert first_time(Action.RAISE, stop_s=0.0, is_stop_missed=True) == pytest.approx(0.05)


def test_second_stop_leaves_the_ranks_time_to_become_equal():
    assert first_time(Action.PASS_STOP, stop_s=0.0, makes_group=True) == NEVER
    assert first_time(Action.ABORT, stop_s=0.0, makes_group=True) == 10.0


@pytest.mark.parametrize("main", ["unwinds", "left"])
def test_workers_come_home_when_rank_0_leaves_by_an_error(main):
    fields = {"main": main, "error": ValueError()}
    assert first_time(Action.ASK, **fields) == pytest.approx(0.3, abs=0.051)
    assert first_time(Action.ASK_ABORT, **fields) == pytest.approx(1.1, abs=0.101)
    assert first_time(Action.KILL, **fields) == pytest.approx(11.1, abs=0.151)
    assert first_time(Action.ASK, **fields, pending=frozenset()) == NEVER
    assert first_time(Action.RAISE, **fields, failure="raised") == NEVER


def test_workers_that_stop_has_interrupted_are_not_interrupted_again_at_once():
    fields = {"main": "left", "error": ValueError(), "stop_s": 0.0}
    assert first_time(Action.ASK, **fields) == pytest.approx(0.5, abs=0.051)
    assert first_time(Action.ASK_ABORT, **fields) == pytest.approx(1.0, abs=0.101)
    assert first_time(Action.KILL, **fields) == pytest.approx(11.0, abs=0.151)


def test_others_are_not_waited_for_when_a_worker_has_died():
    assert first_time(Action.KILL, main="left", failure="died") == 0.0
    assert first_time(Action.KILL, main="unwinds", failure="died", limit_s=5.0) == NEVER


def test_workers_in_a_collective_that_rank_0_never_joins_are_freed_at_once():
    assert first_time(Action.ASK_ABORT, main="left", failure="diverged") == pytest.approx(0.1, abs=0.051)


@pytest.mark.parametrize(
    ("main", "own", "ended", "running", "named"),
    [
        ("runs", 5, {1: 4}, {}, "rank 0 is in collective number 5, which rank 1 will never join"),
        ("runs", 5, {1: 4, 2: 3}, {}, "which ranks 1, 2 will never join: they have ended the cell"),
        ("left", 4, {}, {1: 5}, "rank 1 waits in collective number 5, which rank 0 will never join"),
        ("left", 4, {1: 4}, {2: 6}, "rank 2 waits in collective number 6"),
        ("left", 4, {}, {1: 5, 2: 5}, "ranks 1, 2 wait in collective number 5"),
    ],
)
def test_divergence_is_named(main, own, ended, running, named):
    assert named in (find_divergence(main, own, ended, running, len(ended) + len(running)) or "")


@pytest.mark.parametrize(
    ("main", "own", "ended", "running", "num_workers"),
    [
        ("runs", 5, {1: 5}, {}, 1),  # It has joined, and has ended.
        ("runs", 5, {1: 6}, {}, 1),  # Rank 0 may still come.
        ("runs", 5, {1: 4}, {2: 4}, 2),  # Rank 2 goes on, and may join.
        ("runs", 5, {}, {1: 4}, 1),
        ("left", 4, {}, {1: 4}, 1),
        ("runs", 4, {}, {1: 5}, 1),
        ("unwinds", 4, {}, {1: 5}, 1),
        ("runs", -1, {1: -1}, {}, 1),  # There is no group.
        ("runs", 0, {1: -1}, {}, 1),
        ("left", -1, {}, {1: 0}, 1),
    ],
)
def test_ranks_that_may_still_meet_have_not_diverged(main, own, ended, running, num_workers):
    assert find_divergence(main, own, ended, running, num_workers) is None
