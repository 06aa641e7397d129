"""Plans for ranks that meet in every micro-batch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.deal import Balance, Piece, balance_step, deal_step
from unsloth_multigpu.step.lockstep import in_lockstep, lockstep_time, plan_waves

COST = CostModel(overhead_tokens=32, attention=1 / 4096)


def rows_of(plan: list[list[Piece]]) -> list[list[list[int]]]:
    return [[list(piece.positions) for piece in share if not piece.is_filler] for share in plan]


def test_a_step_takes_the_slowest_rank_of_each_round() -> None:
    plain = CostModel(overhead_tokens=0)
    plan = [[[0], [1]], [[2]]]
    # 8 meets 5, 2 meets a filler of the shortest row.
    assert lockstep_time(plan, [8, 2, 5], (1.0, 1.0), plain) == 8 + 2
    assert lockstep_time(plan, [8, 2, 5], (1.0, 0.5), plain) == 10 + 4


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 500), min_size=4, max_size=40),
    st.integers(1, 4),
    st.integers(100, 2000),
)
def test_waves_hold_every_row_once_within_the_limit(lengths: list[int], world_size: int, limit: int) -> None:
    plan = plan_waves(lengths, world_size, COST, limit)
    parts = [part for share in plan for part in share]
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= limit for part in parts)
    counts = [len(share) for share in plan]
    assert max(counts) - min(counts) <= 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=8, max_size=32), st.integers(2, 4), st.booleans())
def test_ranks_have_equally_many_micro_batches_and_every_sample_once(
    lengths: list[int], world_size: int, regroup: bool
) -> None:
    sizes = [4] * (len(lengths) // 4)
    lengths = lengths[: sum(sizes)]
    balance = Balance(COST, (1.0,) * world_size)
    plan = in_lockstep(balance_step(lengths, sizes, balance, regroup=regroup, is_lockstep=True), whole=False)
    assert len({len(share) for share in plan}) == 1
    assert sorted(i for share in rows_of(plan) for part in share for i in part) == list(range(len(lengths)))
    for share in plan:
        fillers = [piece.is_filler for piece in share]
        # Gradients meet in the last micro-batch.
        assert fillers == sorted(fillers, reverse=True)
        assert [p.work for p in share if not p.is_filler] == sorted(p.work for p in share if not p.is_filler)
        assert all(piece.share == 0 for piece in share if piece.is_filler)


def test_filler_is_a_whole_micro_batch_where_these_are_never_cut() -> None:
    plan = in_lockstep(deal_step([3, 3, 2], 2, regroup=False, whole=True), whole=True)
    (filler,) = [piece for share in plan for piece in share if piece.is_filler]
    assert filler.positions == (6, 7)
    one_row = in_lockstep(deal_step([3, 3, 2], 2, regroup=False), whole=False)
    assert all(len(piece.positions) == 1 for share in one_row for piece in share if piece.is_filler)


@pytest.mark.parametrize(("world_size", "num_rows"), [(2, 16), (4, 32), (8, 64)])
def test_plan_is_never_slower_than_in_order_and_than_the_plan_for_free_ranks(world_size: int, num_rows: int) -> None:
    draws = random.Random(0)
    for _ in range(5):
        lengths = [max(8, min(1024, round(draws.lognormvariate(5, 0.8)))) for _ in range(num_rows)]
        sizes, speeds = [8] * (num_rows // 8), (1.0,) * world_size
        plans = {
            "in order": deal_step(sizes, world_size, regroup=True),
            "free": balance_step(lengths, sizes, Balance(COST, speeds), regroup=True),
            "lockstep": balance_step(lengths, sizes, Balance(COST, speeds), regroup=True, is_lockstep=True),
        }
        times = {name: lockstep_time(rows_of(plan), lengths, speeds, COST) for name, plan in plans.items()}
        assert times["lockstep"] <= times["free"] < times["in order"]
