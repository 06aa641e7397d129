"""Decides from the heartbeats of the ranks whether one of them hangs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unsloth_multigpu.wire.heartbeat import Heartbeat, Phase

# The limit is at least this factor times the longest work of this run so far: the next micro-batch may be longer, and
# its device may still have a whole step to compute.
_WORK_FACTOR = 10
# Nodes report once a second, so a silence up to this limit is normal.
_NEWS_S = 3.0

# Phases that also occur between two steps, where no micro-batch is computed yet.
_BETWEEN_STEPS = (Phase.UPDATE, Phase.EVALUATE, Phase.SAVE, Phase.AGREE, Phase.CALLBACKS)
# Outside the training: the script's own work, which may take hours.
_OUTSIDE = (Phase.SCRIPT, Phase.ENDED)


@dataclass(frozen=True)
class Hang:
    """A hang that was found.

    Args:
        rank: The hung rank that the others wait for; None if no single rank is to blame.
        message: Description without a full stop.
        step: Last finished step of that rank, or of the rank furthest behind.
    """

    rank: int | None
    message: str
    step: int


def find_hang(
    beats: Mapping[int, Heartbeat],
    now_s: float,
    hang_timeout_s: float,
    *,
    since_s: float = 0.0,
    unheard_s: Mapping[str, float] | None = None,
) -> Hang | None:
    """Finds a hung rank by the latest heartbeats.

    A rank hangs if its pulse has stopped, or if its main thread has reported no progress for longer than the limit of
    its phase. A waiting rank does not hang as long as the rank it waits for is within its limit. Ranks of other nodes
    are watched by their own supervisors.

    Args:
        beats: Heartbeats of the living ranks of this node.
        hang_timeout_s: Limit of one micro-batch, or of loading one step's samples; 0 = no limit. If earlier work took
            more than a tenth of it, the limit is ten times that work. A node that is silent for longer counts as lost.
        since_s: Silence before this time does not count: the ranks were not watched, or the machine was suspended.
        unheard_s: Seconds since the last record of each other node, by the node's name.
    """
    if hang_timeout_s <= 0:
        return None
    work_s = _WORK_FACTOR * max((b.longest_s for b in beats.values()), default=0.0)
    limit_s = {r: max(hang_timeout_s * _factor(b), work_s) for r, b in beats.items()}
    silent_s = {r: now_s - max(b.alive_s, b.progress_s, since_s) for r, b in beats.items()}
    if stopped := [r for r in beats if silent_s[r] > limit_s[r]]:
        rank = max(stopped, key=lambda r: silent_s[r])
        silent = f"no sign of life for {silent_s[rank]:.0f} s {where(beats[rank])}"
        message = f"rank {rank} hangs: {silent}; its process is stopped, or native code holds the interpreter's lock"
        return Hang(rank, message, beats[rank].step)
    lost_s = {name: s for name, s in (unheard_s or {}).items() if s > max(hang_timeout_s, _NEWS_S)}
    if unheard_s and not lost_s:
        # The rank that is waited for may be saving on another node.
        limit_s = dict.fromkeys(beats, max(Phase.SAVE.limit_factor * hang_timeout_s, work_s))
    still_s = {r: now_s - max(b.progress_s, since_s) for r, b in beats.items()}
    overdue = {r for r, b in beats.items() if b.phase not in _OUTSIDE and still_s[r] > limit_s[r]}
    hung = {r for r in overdue if not any(_may_wait_for(beats[r], beats[q]) for q in beats.keys() - overdue)}
    lost = ", ".join(f"{name} has not reported for {s:.0f} s" for name, s in lost_s.items())
    return _blame(beats, hung, still_s, lost) if hung else None


def where(beat: Heartbeat) -> str:
    """Describes where a rank is: "in step 13, getting samples"."""
    doing = beat.phase.doing
    if beat.phase in (*_OUTSIDE, Phase.SETUP):
        return doing if beat.step <= 0 else f"after step {beat.step}, {doing}"
    if _is_between_steps(beat):
        return f"after step {beat.step}, {'between two steps' if beat.phase == Phase.UPDATE else doing}"
    return f"in step {beat.step + 1}, {doing}"


def _factor(beat: Heartbeat) -> int:
    return (Phase.CALLBACKS if _is_behind_update(beat) else beat.phase).limit_factor


def _is_behind_update(beat: Heartbeat) -> bool:
    """True between two steps, while callbacks run and ranks are compared."""
    return beat.phase == Phase.UPDATE and _is_between_steps(beat)


def _is_between_steps(beat: Heartbeat) -> bool:
    return beat.micro_batch == 0 and beat.phase in _BETWEEN_STEPS


def _may_wait_for(waiting: Heartbeat, other: Heartbeat) -> bool:
    if other.phase in _OUTSIDE:
        # Before a training or between two. A rank past its last step joins no further collective.
        return waiting.phase == Phase.SETUP or other.step < 0
    return _place(waiting) >= _place(other)


def _place(beat: Heartbeat) -> tuple[int, int, int, int]:
    """Returns a position that grows during a training. UPDATE comes before a step's micro-batches and after each."""
    order = {Phase.SETUP: -1, Phase.DATA: 1, Phase.FILL: 1}
    order |= dict.fromkeys((Phase.COMPUTE, Phase.WARM_UP, Phase.COMPILE, Phase.GENERATE), 2)
    return beat.collective, beat.step, beat.micro_batch, order.get(beat.phase, 0)


def _blame(beats: Mapping[int, Heartbeat], hung: Collection[int], still_s: Mapping[int, float], lost: str) -> Hang:
    """Blames the ranks that are furthest behind, or a lost node if all of these may wait for it."""
    last = [r for r in sorted(hung) if not any(_place(beats[q]) < _place(beats[r]) for q in hung)]
    are_all = len(last) == len(beats)
    gone = f"; {lost}: the connection is gone, or that machine" if lost else ""
    # Such a rank may wait for another node: it reads the store of the ranks, or it is in a comparison of all ranks.
    may_wait = (beats[r].phase == Phase.AGREE or _is_behind_update(beats[r]) for r in last)
    if lost and (are_all or all(may_wait)):
        rank = min(hung, key=lambda r: still_s[r])
        place = f"for {still_s[rank]:.0f} s ({where(beats[rank])})"
        return Hang(None, f"all ranks of this node make no progress {place}{gone}", beats[rank].step)
    beat = beats[last[0]]
    progress = f"no progress for {min(still_s[r] for r in last):.0f} s {where(beat)}"
    if are_all and len(beats) > 1:
        why = "they wait for each other, the connection between them is gone, or a device has stopped"
        return Hang(None, f"all ranks hang: {progress}: {why}", beat.step)
    who = f"rank {last[0]} hangs" if len(last) == 1 else f"ranks {' and '.join(map(str, last))} hang"
    ended = "".join(f"; rank {r} ended after step {b.step}" for r, b in beats.items() if b.phase in _OUTSIDE)
    return Hang(last[0] if len(last) == 1 else None, f"{who}: {progress}{ended}{gone}", beat.step)
