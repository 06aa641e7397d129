"""Plans for ranks that meet in every layer of every micro-batch, as they do where weights are sharded. Pure.

Such ranks take, for each micro-batch in turn, as long as the slowest of them: a step costs `sum_k max_r cost(r, k)`,
and not `max_r sum_k cost(r, k)`. All ranks need the same number of micro-batches, or they hang.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.plan import MicroBatches

if TYPE_CHECKING:
    from unsloth_multigpu.step.deal import Piece


def lockstep_time(
    plan: Sequence[MicroBatches], lengths: Sequence[int], speeds: Sequence[float], cost: CostModel
) -> float:
    """Time of a step, in tokens, where the micro-batches of all ranks are computed from the costliest on."""
    filler = cost.of([min(lengths)])
    times = [
        sorted((cost.of([lengths[i] for i in part]) / speed for part in share), reverse=True)
        for share, speed in zip(plan, speeds, strict=True)
    ]
    most = max(map(len, times))
    filled = [share + [filler / speed] * (most - len(share)) for share, speed in zip(times, speeds, strict=True)]
    rounds = zip(*filled, strict=True)
    return float(sum(map(max, rounds)))


def plan_waves(lengths: Sequence[int], world_size: int, cost: CostModel, max_tokens: int) -> list[MicroBatches]:
    """Regroups the rows of a step into waves: one micro-batch for each rank, of rows that are about equally long.

    Rows are sorted by length and taken `world_size` at a time, one for each rank. Dynamic programming finds how many
    such turns make up each wave so that the step takes the least time.

    Args:
        lengths: Tokens of each sample, at least `world_size` of them.
        world_size: Number of ranks, taken to be equally fast.
        cost: Of a micro-batch.
        max_tokens: Most tokens of a micro-batch, except for one of a single row.

    Returns:
        `plan[rank]` = its micro-batches, indices into `lengths`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    turns = [order[start : start + world_size] for start in range(0, len(order), world_size)]
    # least[t]: time of the first t turns, the last wave of which begins with turn first[t].
    least, first = [0.0] + [math.inf] * len(turns), [0] * (len(turns) + 1)
    for begin in range(len(turns)):
        longest = lengths[turns[begin][0]]
        for end in range(begin + 1, len(turns) + 1):
            rows = [lengths[turn[0]] for turn in turns[begin:end]]
            tokens = len(rows) * cost.padded(longest) if cost.is_padded else sum(map(cost.padded, rows))
            if len(rows) > 1 and tokens > max_tokens:
                break
            time = least[begin] + cost.of(rows)
            if time < least[end]:
                least[end], first[end] = time, begin
    waves, end = [], len(turns)
    while end:
        waves.append(turns[first[end] : end])
        end = first[end]
    return [
        [[turn[rank] for turn in wave if rank < len(turn)] for wave in waves if rank < len(wave[0])]
        for rank in range(world_size)
    ]


def in_lockstep(plan: Sequence[Sequence[Piece]], *, whole: bool) -> list[list[Piece]]:
    """Gives all ranks the same number of micro-batches, by fillers, and lets the costliest of all ranks meet.

    They are last: gradients meet in a rank's last micro-batch, which is then never a filler where it has a sample.

    Args:
        plan: `plan[rank]` = its micro-batches.
        whole: See `deal_step`.
    """
    most = max(map(len, plan))
    pieces = [piece for share in plan for piece in share]
    smallest = min(pieces, key=lambda p: (p.work / len(p.positions), len(p.positions), p.positions))
    positions = min(pieces, key=lambda p: len(p.positions)).positions if whole else smallest.positions[-1:]
    filler = replace(smallest, positions=positions, share=0.0, reference=0, is_filler=True, work=0.0)
    return [
        [*[filler] * (most - len(share)), *sorted(share, key=lambda p: (p.work, p.is_filler is False))]
        for share in plan
    ]
