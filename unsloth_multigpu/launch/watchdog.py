"""Is a rank hung, and which one? A pure decision over the pages that the ranks write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from unsloth_multigpu.wire.beat import Beat, Node, Phase

# A rank may be silent for `hang_timeout_s` times the factor of its phase.
_FACTORS = dict.fromkeys((Phase.DATA, Phase.COMPUTE, Phase.UPDATE, Phase.AGREE), 1)
_FACTORS |= {Phase.FILL: 5, Phase.EVALUATE: 5}
# Between two steps: callbacks may generate a sample, a tracker may wait for its server.
_CALLBACKS_FACTOR = 5
# Loading, saving, compiling, and all up to the end of a training's first step.
LONGEST_FACTOR = 10
# Whatever the limit is, a rank may be silent for this factor times the longest work of this run so far: the next
# micro-batch may be longer, and its device may still have a whole step to compute.
_WORK_FACTOR = 10
# Nodes report once a second how their ranks are. An older report says nothing about the present.
_NEWS_S = 3.0
# A rank of another node is left to its own supervisor for this long, which knows more about it.
_OTHERS_GRACE_S = 5.0

# Outside the training: the script's own work, which may take hours.
_OUTSIDE = (Phase.SCRIPT, Phase.ENDED)

_DOING = {
    Phase.SCRIPT: "outside train()",
    Phase.SETUP: "before the first step",
    Phase.DATA: "getting samples",
    Phase.COMPUTE: "computing",
    Phase.UPDATE: "updating weights",
    Phase.EVALUATE: "evaluating",
    Phase.SAVE: "saving",
    Phase.COMPILE: "compiling",
    Phase.ENDED: "after the last step",
    Phase.GENERATE: "generating samples",
    Phase.WARM_UP: "computing",
    Phase.FILL: "getting the first samples of an epoch",
    Phase.AGREE: "asking the other ranks what comes next",
}


@dataclass(frozen=True)
class Hang:
    """Ranks that will not continue by themselves.

    Args:
        rank: The rank that the others wait for; None where none is to blame.
        message: What is known, without a full stop.
        step: Last finished step of the rank, or of the rank with the fewest.
    """

    rank: int | None
    message: str
    step: int


def find_hang(
    beats: Mapping[int, Beat],
    now_s: float,
    hang_timeout_s: float,
    *,
    since_s: float = 0.0,
    others: Sequence[Node] = (),
) -> Hang | None:
    """Judges ranks by their latest beats.

    A rank is hung when its pulse has stopped, or when its main thread has said nothing for longer than its phase may
    take. A rank that may be waiting for another one is not hung while that one is within its own limit: while rank 0
    saves, the others have its time. Ranks of other nodes are judged as soon as one of this node makes no progress.

    Args:
        beats: Of the ranks of this node that live and train.
        now_s: The time, on `time.monotonic`'s clock.
        hang_timeout_s: Limit of one micro-batch, or of getting one step's samples; 0 = nothing is judged. Longer where
            this run has done work that took a tenth of it or more. A node that is not heard for longer counts as lost.
        since_s: What happened earlier does not count, because nothing was watched, or the machine was stopped.
        others: The other nodes of this round.
    """
    if hang_timeout_s <= 0:
        return None
    unheard_s = {n.index: now_s - n.heard_s for n in others}
    heard = [n for n in others if unheard_s[n.index] <= _NEWS_S]
    known = {**{r: b for n in heard for r, b in n.beats.items()}, **beats}
    work_s = _WORK_FACTOR * max((b.longest_s for b in known.values()), default=0.0)
    limit_s = {
        r: max(hang_timeout_s * _factor(b), work_s) + (0 if r in beats else _OTHERS_GRACE_S) for r, b in known.items()
    }
    still_s = {r: now_s - max(b.progress_s, since_s) for r, b in known.items()}
    overdue = {r for r, b in known.items() if b.phase not in _OUTSIDE and still_s[r] > limit_s[r]}
    silent_s = {r: now_s - max(b.alive_s, b.progress_s, since_s) for r, b in known.items()}
    stopped = [r for r in known if silent_s[r] > limit_s[r] and (r in beats or overdue & beats.keys())]
    if stopped:
        rank = max(stopped, key=lambda r: (r in beats, silent_s[r]))
        lost = f"no sign of life for {silent_s[rank]:.0f} s {where(known[rank])}"
        message = f"rank {rank} hangs: {lost}; its process is stopped, or native code holds the interpreter's lock"
        return _name_node(Hang(rank, message, known[rank].step), heard, beats)
    hung = {r for r in overdue if not any(_may_wait_for(known[r], known[q]) for q in known.keys() - overdue)}
    if not hung & beats.keys():
        return None
    lost_s = {n: s for n, s in unheard_s.items() if s > max(hang_timeout_s, _NEWS_S)}
    is_complete = all(n in heard and n.beats for n in others)
    hang = _find_left(known, hung)
    if hang is None and not is_complete and _waits_for_others(known, hung, beats):
        waits = hung & beats.keys()
        if not lost_s and min(still_s[r] for r in waits) <= hang_timeout_s * LONGEST_FACTOR:
            return None  # A rank of a node that has not reported yet may be saving.
        return _blame_nodes({r: beats[r] for r in waits}, still_s, [n for n in others if n.index in lost_s], lost_s)
    if hang is None:
        hang = _blame(known, hung, still_s)
        if lost_s:
            lost = _lost_nodes([n for n in others if n.index in lost_s], lost_s)
            hang = replace(hang, message=f"{hang.message}; {lost}")
    return _name_node(hang, heard, beats)


def where(beat: Beat) -> str:
    """Place of a rank in the training: "in step 13, getting samples"."""
    doing = _DOING[beat.phase]
    if beat.phase in (*_OUTSIDE, Phase.SETUP):
        return doing if beat.step <= 0 else f"after step {beat.step}, {doing}"
    if _is_between_steps(beat):
        return f"after step {beat.step}, {'between two steps' if beat.phase == Phase.UPDATE else doing}"
    return f"in step {beat.step + 1}, {doing}"


def _factor(beat: Beat) -> float:
    # In a collective a rank does no long work itself; the rank that it waits for has the limit of its own phase.
    if beat.operation and beat.phase in (Phase.UPDATE, Phase.EVALUATE, Phase.SAVE):
        return 1
    if beat.phase == Phase.UPDATE and _is_between_steps(beat):
        return _CALLBACKS_FACTOR
    return _FACTORS.get(beat.phase, LONGEST_FACTOR)


def _is_between_steps(beat: Beat) -> bool:
    return beat.micro_batch == 0 and beat.phase in (Phase.UPDATE, Phase.EVALUATE, Phase.SAVE, Phase.AGREE)


def _may_wait_for(waiting: Beat, other: Beat) -> bool:
    """True if `other` can still do what the rank at `waiting` waits for."""
    if other.phase in _OUTSIDE:
        # It is before its training, or between two. A rank past its last step joins no other collective.
        return waiting.phase == Phase.SETUP or other.step < 0
    return not _is_before(waiting, other)


def _is_before(one: Beat, other: Beat) -> bool:
    """True if `one` has not yet done what `other` has done."""
    if one.collective != other.collective:
        return one.collective < other.collective
    return _place(one) < _place(other)


def _place(beat: Beat) -> tuple[int, int, int]:
    """Grows while a rank trains. UPDATE comes before a step's micro-batches and after each of them."""
    order = {Phase.SETUP: -1, Phase.DATA: 1, Phase.FILL: 1}
    order |= dict.fromkeys((Phase.COMPUTE, Phase.WARM_UP, Phase.COMPILE, Phase.GENERATE), 2)
    return beat.step, beat.micro_batch, order.get(beat.phase, 0)


def _find_left(beats: Mapping[int, Beat], hung: Collection[int]) -> Hang | None:
    """A rank that is past its last step, while another one waits for it in one more step."""
    is_known = any(b.operation for b in beats.values())
    for rank in sorted(hung):
        beat = beats[rank]
        next_step = beat.step if _is_between_steps(beat) else beat.step + 1
        if beat.phase == Phase.SETUP or (is_known and not beat.operation):
            continue
        for other, left in sorted(beats.items()):
            if left.phase in _OUTSIDE and 0 <= left.step < next_step:
                ended = f"rank {other} has no more batches after step {left.step}, or was told to stop there"
                return Hang(other, f"{ended}; rank {rank} waits in step {next_step}", left.step)
    return None


def _find_last(beats: Mapping[int, Beat], hung: Collection[int]) -> list[int]:
    return [r for r in sorted(hung) if not any(_is_before(beats[q], beats[r]) for q in hung)]


def _waits_for_others(beats: Mapping[int, Beat], hung: Collection[int], own: Collection[int]) -> bool:
    """True if a rank of a node without news can be to blame, because no known rank is busy or behind."""
    last = _find_last(beats, hung)
    # Ranks at one place wait for the same, although the pulse of one may not have named its collective yet.
    if set(own) <= set(last):
        return True
    # A rank in AGREE waits for the store, which another node may serve.
    return all(beats[r].operation or beats[r].phase == Phase.AGREE for r in last)


def _blame_nodes(
    waits: Mapping[int, Beat], still_s: Mapping[int, float], lost: Sequence[Node], lost_s: Mapping[int, float]
) -> Hang:
    rank = min(waits, key=lambda r: still_s[r])
    beat, name = waits[rank], waits[rank].operation
    doing = f"wait in {name} for {still_s[rank]:.0f} s" if name else f"make no progress for {still_s[rank]:.0f} s"
    why = "the connection between ranks is gone, or a device has stopped computing"
    if lost:
        why = _lost_nodes(lost, lost_s)
    return Hang(None, f"all ranks of this node {doing} ({where(beat)}); {why}", beat.step)


def _lost_nodes(lost: Sequence[Node], lost_s: Mapping[int, float]) -> str:
    each = [f"node {n.index}{_ranks_of(n)} has not been heard for {lost_s[n.index]:.0f} s" for n in lost]
    return f"{', '.join(each)}: the connection is gone, or that machine"


def _ranks_of(node: Node) -> str:
    named = ", ".join(map(str, sorted(node.beats)))
    return f" (rank{'s' * (len(node.beats) > 1)} {named})" if named else ""


def _name_node(hang: Hang, heard: Sequence[Node], own: Collection[int]) -> Hang:
    if hang.rank is None or hang.rank in own:
        return hang
    index = next(n.index for n in heard if hang.rank in n.beats)
    return replace(hang, message=f"{hang.message}; rank {hang.rank} is on node {index}")


def _blame(beats: Mapping[int, Beat], hung: Collection[int], still_s: Mapping[int, float]) -> Hang:
    # The ranks that are furthest behind, and among these the ones that do not wait in a collective.
    last = _find_last(beats, hung)
    busy = [r for r in last if not beats[r].operation]
    silent_s = min(still_s[r] for r in last)
    beat = beats[last[0]]
    if len(busy or last) < len(beats) or len(beats) == 1:
        last = busy or last
        beat = beats[last[0]]
        inside = f", in {beat.operation}, which the others have left" if beat.operation else ""
        who = f"rank {last[0]} hangs" if len(last) == 1 else f"ranks {' and '.join(map(str, last))} hang"
        message = f"{who}: no progress for {silent_s:.0f} s {where(beat)}{inside}"
        return Hang(last[0] if len(last) == 1 else None, message, beat.step)
    if len({beats[r].operation for r in last}) > 1:
        each = ", ".join(f"rank {r} in {beats[r].operation}" for r in last)
        return Hang(None, f"the ranks wait in different operations for {silent_s:.0f} s: {each}", beat.step)
    if not beat.operation:
        return Hang(None, f"all ranks hang: no progress for {silent_s:.0f} s {where(beat)}", beat.step)
    waits = f"all ranks wait in {beat.operation} for {silent_s:.0f} s ({where(beat)})"
    return Hang(None, f"{waits}: the connection between ranks is gone, or a device has stopped computing", beat.step)
