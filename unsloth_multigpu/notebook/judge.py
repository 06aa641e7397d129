"""Decides what a notebook's kernel does when ranks do not end a cell together. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from unsloth_multigpu.notebook.kernel import Cell

# Seconds from a failure of another rank until an exception is raised in the kernel's main thread. Longest after an
# error of a worker: rank 0 may be about to raise the same error, and then its own traceback is the best one to show.
_GRACE_S = {"raised": 1.4, "died": 0.25, "hung": 0.0, "diverged": 0.0}
# Seconds from that exception until the process group is aborted: the exception ends Python code, but no collective.
_ABORT_AFTER_S = 0.5
_STOP_ABORT_AFTER_S = 1.0
# While a new group is opened. Longer, because users often press Stop twice, and the second time may come then.
_GROUP_STOP_AFTER_S = 10.0
_MISSED_STOP_AFTER_S = 0.05
_ASYNC_STOP_AFTER_S = 0.2
# Seconds from the end of the cell in the kernel until the workers are asked to leave it, and from then until they are
# asked to abort their group. If all ranks raise the same error, the workers leave by themselves in this time. After
# Stop, an earlier request would interrupt their clean-up.
_ASK_AFTER_S = 0.5
_ASK_ABORT_AFTER_S = 0.5
_KILL_AFTER_S = 10.0
# Ranks do not begin a collective at exactly the same time.
DIVERGED_AFTER_S = 1.0

MainState = Literal["runs", "unwinds", "left"]
FailureKind = Literal["raised", "died", "hung", "diverged"]


class Action(enum.Enum):
    """Actions of the kernel to end a cell. Each is taken at most once in a cell."""

    PASS_STOP = "interrupt the workers, too"
    RAISE = "raise an error in the kernel's main thread, or cancel the task of an async cell"
    ABORT = "abort the kernel's process group"
    ASK = "ask the workers to leave the cell"
    ASK_ABORT = "ask the workers to abort their process group"
    KILL = "kill the workers that are still in the cell"


def next_actions(cell: Cell, now_s: float, pending: Collection[int]) -> list[Action]:
    """Returns the actions that are due at `now_s`, a time of the same clock as the cell's times.

    `pending` are the ranks of the living workers that have not ended the cell.
    """
    times_s = _end_own_part(cell) if cell.main_state == "runs" else _end_workers_part(cell, now_s, pending)
    if cell.stop_s is not None and pending and not cell.makes_group:
        times_s[Action.PASS_STOP] = cell.stop_s
    return [action for action, time_s in times_s.items() if action not in cell.done and now_s >= time_s]


def _end_own_part(cell: Cell) -> dict[Action, float]:
    """Returns the times of the actions that end the cell in the kernel's main thread."""
    due_s = {}
    if cell.failure is not None:
        due_s[Action.RAISE] = cell.failure_s + _GRACE_S[cell.failure]
        if Action.RAISE in cell.done:
            due_s[Action.ABORT] = cell.done[Action.RAISE] + _ABORT_AFTER_S
    elif cell.stop_s is not None and cell.makes_group:
        due_s[Action.ABORT] = cell.stop_s + _GROUP_STOP_AFTER_S
    elif cell.stop_s is not None:
        if cell.is_stop_missed or cell.task is not None:  # In an async cell a signal may reach only the event loop.
            due_s[Action.RAISE] = cell.stop_s + (_MISSED_STOP_AFTER_S if cell.is_stop_missed else _ASYNC_STOP_AFTER_S)
        due_s[Action.ABORT] = cell.stop_s + _STOP_ABORT_AFTER_S
    return due_s


def _end_workers_part(cell: Cell, now_s: float, pending: Collection[int]) -> dict[Action, float]:
    """Returns the times of the actions that end the cell on the workers, after it has ended in the kernel."""
    is_well = cell.error is None and cell.stop_s is None and cell.failure is None
    if is_well or not pending:
        return {}
    if cell.failure == "died" and cell.main_state == "left":
        return {Action.KILL: now_s}  # The kernel continues alone in any case.
    due_s = {Action.ASK: max(cell.main_state_since_s, cell.done.get(Action.PASS_STOP, 0.0)) + _ASK_AFTER_S}
    if Action.ASK in cell.done:
        due_s[Action.ASK_ABORT] = cell.done[Action.ASK] + _ASK_ABORT_AFTER_S
    if Action.ASK_ABORT in cell.done:
        due_s[Action.KILL] = cell.done[Action.ASK_ABORT] + _KILL_AFTER_S
    return due_s


def find_divergence(
    main_state: MainState, own: int, ended: Mapping[int, int], running: Mapping[int, int], num_workers: int
) -> str | None:
    """Describes ranks that would wait forever in a collective that the others will never join; None without any.

    No timeout is needed: a rank that has ended the cell, or waits for a value of rank 0, begins no more collectives.

    Args:
        main_state: State of the kernel's main thread.
        own: Number of the last collective that the kernel began.
        ended: That number of each worker that has ended the cell without an error or waits for rank 0, by rank.
        running: That number of each other worker, by rank, as last reported.
        num_workers: Ranks above 0.
    """
    if main_state == "runs" and len(ended) == num_workers and ended and own > max(ended.values()) >= 0:
        return (
            f"rank 0 is in collective number {own}, which {_ranks(ended)} will never join: "
            f"they have ended the cell, or wait for rank 0, after number {max(ended.values())}"
        )
    ahead = [rank for rank, number in running.items() if number > own >= 0]
    if main_state == "left" and ahead:
        return (
            f"{_ranks(ahead)} wait{'s' * (len(ahead) == 1)} in collective number {running[ahead[0]]}, "
            f"which rank 0 will never join: it has ended the cell after number {own}"
        )
    return None


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
