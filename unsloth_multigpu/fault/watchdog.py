"""Is a rank hung, and which one? A pure decision over the pages that the ranks write."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unsloth_multigpu.fault.beat import Beat, Phase

# A rank may be silent for so many times `hang_timeout_s`.
_FACTORS = {Phase.DATA: 1, Phase.COMPUTE: 1, Phase.UPDATE: 1, Phase.EVALUATE: 5}
_LONGEST_FACTOR = 10
# Kernels are compiled and memory is laid out in the first step.
_FIRST_STEP_FACTOR = 2

# Outside the training: the rank's own business, and there may be hours of it.
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
    Phase.ENDED: "behind the last step",
}


@dataclass(frozen=True)
class Hang:
    """Ranks that will not go on by themselves.

    Args:
        rank: The rank that the others wait for; None where none is to blame.
        message: What is known, without a full stop.
        step: Last finished step of the rank, or of the rank that is least far.
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
    is_one_node: bool = True,
) -> Hang | None:
    """Judges ranks by their latest beats.

    A rank is hung when its pulse has stopped, or when its main thread has said nothing, for longer than its phase may
    take. Not one that can be waiting for a rank that is still within its own limit: saving on rank 0 keeps the
    others waiting, and they have its time.

    Args:
        beats: Of the ranks of this node that live and train.
        now_s: The time, on `time.monotonic`'s clock.
        hang_timeout_s: Limit of one micro-batch, or of getting one step's samples; 0 = nothing is judged.
        since_s: What happened earlier does not count, because nobody watched, or the machine stood still.
        is_one_node: False where ranks of other nodes take part, whose phases nobody knows here.
    """
    if hang_timeout_s <= 0:
        return None
    silent_s = {r: now_s - max(b.alive_s, b.progress_s, since_s) for r, b in beats.items()}
    stopped = [r for r, b in beats.items() if silent_s[r] > hang_timeout_s * _factor(b)]
    if stopped:
        rank = max(stopped, key=lambda r: silent_s[r])
        lost = f"no sign of life for {silent_s[rank]:.0f} s {where(beats[rank])}"
        message = f"rank {rank} hangs: {lost}; its process is stopped, or native code holds the interpreter's lock"
        return Hang(rank, message, beats[rank].step)
    still_s = {r: now_s - max(b.progress_s, since_s) for r, b in beats.items()}
    overdue = {r for r, b in beats.items() if b.phase not in _OUTSIDE and still_s[r] > hang_timeout_s * _factor(b)}
    hung = {r for r in overdue if not any(_may_wait_for(beats[r], beats[q]) for q in beats.keys() - overdue)}
    if not hung:
        return None
    return _find_left(beats, hung) or _blame(beats, hung, still_s, hang_timeout_s, is_one_node)


def where(beat: Beat) -> str:
    """Place of a rank in the training: "in step 13, getting samples"."""
    doing = _DOING[beat.phase]
    if beat.phase in (*_OUTSIDE, Phase.SETUP):
        return doing if beat.step <= 0 else f"after step {beat.step}, {doing}"
    if _is_between_steps(beat):
        return f"after step {beat.step}, {'between two steps' if beat.phase == Phase.UPDATE else doing}"
    return f"in step {beat.step + 1}, {doing}"


def _factor(beat: Beat) -> float:
    is_first = beat.step <= 0 and beat.phase in (Phase.DATA, Phase.COMPUTE, Phase.UPDATE)
    return _FIRST_STEP_FACTOR if is_first else _FACTORS.get(beat.phase, _LONGEST_FACTOR)


def _is_between_steps(beat: Beat) -> bool:
    return beat.micro_batch == 0 and beat.phase in (Phase.UPDATE, Phase.EVALUATE, Phase.SAVE)


def _may_wait_for(waiting: Beat, other: Beat) -> bool:
    """True if `other` can still bring what a rank waits for that stands at `waiting`."""
    if other.phase in _OUTSIDE:
        # Before its training, or between two; one that is behind its last step comes to no other.
        return waiting.phase == Phase.SETUP or other.step < 0
    return not _is_before(waiting, other)


def _is_before(one: Beat, other: Beat) -> bool:
    """True if `one` has yet to do what `other` has done."""
    if one.collective != other.collective:
        return one.collective < other.collective
    return _place(one) < _place(other)


def _place(beat: Beat) -> tuple[int, int, int]:
    """Grows while a rank trains. UPDATE stands before a step's micro-batches and behind each of them."""
    order = {Phase.SETUP: -1, Phase.DATA: 1, Phase.COMPUTE: 2, Phase.COMPILE: 2}
    return beat.step, beat.micro_batch, order.get(beat.phase, 0)


def _find_left(beats: Mapping[int, Beat], hung: Collection[int]) -> Hang | None:
    """A rank that is behind its last step, while another waits for it in one more."""
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


def _blame(
    beats: Mapping[int, Beat],
    hung: Collection[int],
    still_s: Mapping[int, float],
    hang_timeout_s: float,
    is_one_node: bool,
) -> Hang | None:
    # Those that stand furthest back, and among them those that wait in no collective.
    last = [r for r in sorted(hung) if not any(_is_before(beats[q], beats[r]) for q in hung)]
    busy = [r for r in last if not beats[r].operation]
    silent_s = min(still_s[r] for r in last)
    beat = beats[last[0]]
    is_known = any(b.operation for b in beats.values())
    if len(last) == len(beats) and not is_one_node and (not busy or not is_known):
        if silent_s <= hang_timeout_s * _LONGEST_FACTOR:
            return None  # A rank of another node may be saving.
    elif len(busy or last) < len(beats) or len(beats) == 1:
        last = busy or last
        beat = beats[last[0]]
        inside = f", in {beat.operation}, which the others have left" if beat.operation else ""
        who = f"rank {last[0]} hangs" if len(last) == 1 else f"ranks {' and '.join(map(str, last))} hang"
        message = f"{who}: no progress for {silent_s:.0f} s {where(beat)}{inside}"
        return Hang(last[0] if len(last) == 1 else None, message, beat.step)
    whose = "all ranks" if is_one_node else "all ranks of this node"
    if len({beats[r].operation for r in last}) > 1:
        each = ", ".join(f"rank {r} in {beats[r].operation}" for r in last)
        return Hang(None, f"the ranks wait in different operations for {silent_s:.0f} s: {each}", beat.step)
    if not beat.operation:
        return Hang(None, f"{whose} hang: no progress for {silent_s:.0f} s {where(beat)}", beat.step)
    waits = f"{whose} wait in {beat.operation} for {silent_s:.0f} s ({where(beat)})"
    return Hang(None, f"{waits}: the connection between ranks is gone, or a device has stopped computing", beat.step)
