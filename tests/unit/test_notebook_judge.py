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


ERROR = {"main": "left", "error": ValueError()}


@pytest.mark.parametrize("main", ["runs", "unwinds", "left"])
def test_cell_that_goes_well_is_left_alone(main):
    assert all(first_time(action, main=main) == NEVER for action in Action)


@pytest.mark.parametrize(
    ("action", "time_s", "fields"),
    [
        # A failure of another rank ends the kernel's part.
        (Action.RAISE, 1.4, {"failure": "raised"}),
        (Action.ABORT, 1.9, {"failure": "raised"}),
        (Action.RAISE, 0.25, {"failure": "died"}),
        (Action.ABORT, 0.75, {"failure": "died"}),
        (Action.RAISE, 0.0, {"failure": "hung"}),
        (Action.ABORT, 0.5, {"failure": "hung"}),
        (Action.RAISE, 0.0, {"failure": "diverged"}),
        (Action.ABORT, 0.5, {"failure": "diverged"}),
        (Action.ASK, NEVER, {"failure": "raised"}),
        # Stop reaches the workers at once, a cell that awaits soon, and a stuck main thread after a second.
        (Action.PASS_STOP, 0.0, {"stop_s": 0.0}),
        (Action.PASS_STOP, 0.0, {"stop_s": 0.0, "main": "left"}),
        (Action.PASS_STOP, NEVER, {"stop_s": 0.0, "pending": frozenset()}),
        (Action.RAISE, NEVER, {"stop_s": 0.0}),
        (Action.RAISE, 0.2, {"stop_s": 0.0, "task": object()}),
        (Action.RAISE, 0.05, {"stop_s": 0.0, "is_stop_missed": True}),
        (Action.ABORT, 1.0, {"stop_s": 0.0}),
        # A second Stop leaves the ranks time to become equal.
        (Action.PASS_STOP, NEVER, {"stop_s": 0.0, "makes_group": True}),
        (Action.ABORT, 10.0, {"stop_s": 0.0, "makes_group": True}),
        # Workers are asked to leave when rank 0 leaves by an error.
        (Action.ASK, 0.5, {**ERROR, "main": "unwinds"}),
        (Action.ASK, 0.5, ERROR),
        (Action.ASK_ABORT, 1.0, ERROR),
        (Action.KILL, 11.0, ERROR),
        (Action.ASK, NEVER, {**ERROR, "pending": frozenset()}),
        (Action.RAISE, NEVER, {**ERROR, "failure": "raised"}),
        # Those that Stop has interrupted are not interrupted again at once.
        (Action.ASK, 0.9, {**ERROR, "stop_s": 0.4}),
        # Others are not waited for when a worker has died.
        (Action.KILL, 0.0, {"main": "left", "failure": "died"}),
        # Those in a collective that rank 0 never joins are freed.
        (Action.ASK_ABORT, 1.0, {"main": "left", "failure": "diverged"}),
    ],
)
def test_action_is_due(action, time_s, fields):
    assert first_time(action, **fields) == pytest.approx(time_s, abs=0.101)


@pytest.mark.parametrize(
    ("main", "own", "ended", "running", "named"),
    [
        ("runs", 5, {1: 4}, {}, "rank 0 is in collective number 5, which rank 1 will never join"),
        ("runs", 5, {1: 4, 2: 3}, {}, "which ranks 1, 2 will never join: they have ended the cell"),
        ("left", 4, {}, {1: 5}, "rank 1 waits in collective number 5, which rank 0 will never join"),
        ("left", 4, {1: 4}, {2: 6}, "rank 2 waits in collective number 6"),
        ("left", 4, {}, {1: 5, 2: 5}, "ranks 1, 2 wait in collective number 5"),
        # They may still meet.
        ("runs", 5, {1: 5}, {}, None),  # It has joined, and has ended.
        ("runs", 5, {1: 6}, {}, None),  # Rank 0 may still come.
        ("runs", 5, {1: 4}, {2: 4}, None),  # Rank 2 goes on, and may join.
        ("runs", 5, {}, {1: 4}, None),
        ("left", 4, {}, {1: 4}, None),
        ("runs", 4, {}, {1: 5}, None),
        ("unwinds", 4, {}, {1: 5}, None),
        ("runs", -1, {1: -1}, {}, None),  # There is no group.
        ("runs", 0, {1: -1}, {}, None),
        ("left", -1, {}, {1: 0}, None),
    ],
)
def test_ranks_that_never_meet_are_named_and_others_are_not(main, own, ended, running, named):
    told = find_divergence(main, own, ended, running, len(ended) + len(running))
    assert (told is None) is (named is None)
    assert (named or "") in (told or "")
