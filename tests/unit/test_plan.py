"""The planner: what every plan of a step keeps, and what it is better at than dealing in order."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsloth_multigpu.deal.cost import CostModel
from unsloth_multigpu.deal.deal import Balance, balance_step, deal_step, in_lockstep
from unsloth_multigpu.deal.plan import lockstep_time, plan_step, slowest_time

SPEEDS = st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.25]), min_size=1, max_size=8).map(tuple)
COSTS = st.builds(
    CostModel,
    overhead_tokens=st.sampled_from([0.0, 8.0, 64.0, 1000.0]),
    floor_tokens=st.sampled_from([0.0, 100.0, 2000.0]),
    attention=st.sampled_from([0.0, 1 / 2000, 1 / 100]),
    is_padded=st.booleans(),
    pad_multiple=st.sampled_from([1, 8]),
)


@st.composite
def steps(draw):
    """Lengths of a step's samples, and the sizes of its micro-batches in one process."""
    size, count = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    sizes = [size] * (count - 1) + [draw(st.integers(1, size))]
    length = st.integers(0, 2000) if draw(st.booleans()) else st.integers(100, 104)
    return draw(st.lists(length, min_size=sum(sizes), max_size=sum(sizes))), sizes


def rows_of(plan):
    return sorted(p for share in plan for piece in share if not piece.is_filler for p in piece.positions)


def parts_of(plan):
    return [[list(piece.positions) for piece in share if not piece.is_filler] for share in plan]


def reach(lengths, sizes, balance):
    """Most tokens that a micro-batch dealt in order could have."""
    in_order = deal_step(sizes, len(balance.speeds), regroup=True)
    parts = [piece.positions for share in in_order for piece in share]
    if balance.cost.is_padded:
        return max(map(len, parts)) * balance.cost.padded(max(lengths))
    return max(sum(lengths[p] for p in part) for part in parts)


@given(steps(), SPEEDS, COSTS)
def test_plan_is_a_partition_with_a_piece_for_every_rank_and_fillers_where_samples_are_too_few(step, speeds, cost):
    lengths, sizes = step
    plan = balance_step(lengths, sizes, Balance(cost, speeds), regroup=True)
    assert rows_of(plan) == list(range(len(lengths)))
    assert len(plan) == len(speeds)
    assert all(piece.positions for share in plan for piece in share)
    assert all(share for share in plan)
    fillers = [piece for share in plan for piece in share if piece.is_filler]
    assert len(fillers) == max(0, len(speeds) - len(lengths))
    assert all(lengths[f.positions[0]] == min(lengths) and f.share == 0 for f in fillers)


@given(steps(), SPEEDS, COSTS)
def test_plan_is_never_slower_than_dealing_in_order(step, speeds, cost):
    lengths, sizes = step
    plan = balance_step(lengths, sizes, Balance(cost, speeds), regroup=True)
    in_order = deal_step(sizes, len(speeds), regroup=True)
    before, after = (slowest_time(parts_of(p), lengths, speeds, cost) for p in (in_order, plan))
    assert after <= before * (1 + 1e-9)


@given(steps(), SPEEDS, st.booleans())
def test_plan_for_unknown_costs_has_no_more_micro_batches_than_dealing_in_order(step, speeds, is_padded):
    lengths, sizes = step
    cost = CostModel(128.0, 512.0, is_padded=is_padded, is_unknown=True)
    plan = balance_step(lengths, sizes, Balance(cost, speeds), regroup=True)
    assert rows_of(plan) == list(range(len(lengths)))
    in_order = parts_of(deal_step(sizes, len(speeds), regroup=True))
    counts, before = (
        max(len(share) / s for share, s in zip(p, speeds, strict=True)) for p in (parts_of(plan), in_order)
    )
    assert counts <= before


@given(steps(), SPEEDS, COSTS)
def test_plan_needs_no_more_memory_than_dealing_in_order_could(step, speeds, cost):
    lengths, sizes = step
    balance = Balance(cost, speeds)
    plan = balance_step(lengths, sizes, balance, regroup=True)
    largest = max(cost.tokens([lengths[i] for i in part]) for share in parts_of(plan) for part in share)
    assert largest <= reach(lengths, sizes, balance)


@given(steps(), SPEEDS, COSTS, st.integers(1, 4000))
def test_limit_holds_but_for_a_sample_that_is_longer(step, speeds, cost, limit):
    lengths, sizes = step
    plan = balance_step(lengths, sizes, Balance(cost, speeds, max_tokens=limit), regroup=True)
    assert rows_of(plan) == list(range(len(lengths)))
    for part in (part for share in parts_of(plan) for part in share):
        assert len(part) == 1 or cost.tokens([lengths[i] for i in part]) <= limit


def ragged(count, seed):
    rng = random.Random(seed)
    return [min(1024, max(8, round(rng.lognormvariate(5.0, 0.9)))) for _ in range(count)]


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 16), (2, 64), (4, 64), (8, 128)])
def test_ragged_rows_are_computed_without_padding_and_waiting(num_ranks, count):
    cost, speeds = CostModel(overhead_tokens=16.0, attention=1 / 4000), (1.0,) * num_ranks
    over_ideal, gains = [], []
    for seed in range(20):
        lengths = ragged(count, seed)
        plan = plan_step(lengths, speeds, cost, 8 * max(lengths))
        in_order = parts_of(deal_step([8] * (count // 8), num_ranks, regroup=True))
        planned = slowest_time(plan, lengths, speeds, cost)
        # No plan can do less than the rows alone, shared out evenly, or than the longest row.
        ideal = max(sum(map(cost.row_work, lengths)) / num_ranks, cost.row_work(max(lengths)))
        over_ideal.append(planned / ideal)
        gains.append(slowest_time(in_order, lengths, speeds, cost) / planned)
    assert statistics.median(over_ideal) < 1.1
    assert statistics.median(gains) > 2.0


def test_slow_rank_gets_less():
    cost, lengths = CostModel(overhead_tokens=16.0), ragged(64, 3)
    plan = plan_step(lengths, (1.0, 0.5), cost, 8 * max(lengths))
    costs = [[cost.of([lengths[i] for i in part]) for part in share] for share in plan]
    fast, slow = map(sum, costs)
    assert fast / slow == pytest.approx(2.0, rel=0.03)
    # The last backward pass hides the exchange of gradients.
    assert all(share[-1] == max(share) > min(share) for share in costs)


def test_lockstep_takes_the_slowest_rank_of_each_round():
    plain = CostModel(overhead_tokens=0)
    plan = [[[0], [1]], [[2]]]
    # 8 meets 5, 2 meets a filler of the shortest row.
    assert lockstep_time(plan, [8, 2, 5], (1.0, 1.0), plain) == 8 + 2
    assert lockstep_time(plan, [8, 2, 5], (1.0, 0.5), plain) == 10 + 4


@given(steps(), st.integers(2, 4), COSTS)
def test_lockstep_has_equally_many_micro_batches_and_is_not_slower(step, world_size, cost):
    lengths, sizes = step
    speeds = (1.0,) * world_size
    planned = balance_step(lengths, sizes, Balance(cost, speeds), regroup=True, is_lockstep=True)
    in_order = deal_step(sizes, world_size, regroup=True)
    before, after = (lockstep_time(parts_of(p), lengths, speeds, cost) for p in (in_order, planned))
    assert after <= before * (1 + 1e-9)
    plan = in_lockstep(planned, regroup=True, whole=False)
    assert len({len(share) for share in plan}) == 1
    assert rows_of(plan) == list(range(len(lengths)))
    for share in plan:
        fillers = [piece.is_filler for piece in share]
        # Gradients meet in the last micro-batch.
        assert fillers == sorted(fillers, reverse=True)
        assert [p.work for p in share if not p.is_filler] == sorted(p.work for p in share if not p.is_filler)
        assert all(piece.share == 0 for piece in share if piece.is_filler)


def test_filler_is_a_whole_micro_batch_where_these_are_never_cut():
    plan = in_lockstep(deal_step([3, 3, 2], 2, regroup=False, whole=True), regroup=False, whole=True)
    (filler,) = [piece for share in plan for piece in share if piece.is_filler]
    assert filler.positions == (6, 7)
    one_row = in_lockstep(deal_step([3, 3, 2], 2, regroup=False), regroup=False, whole=False)
    assert all(len(piece.positions) == 1 for share in one_row for piece in share if piece.is_filler)


@given(st.lists(st.integers(1, 900), min_size=24, max_size=24), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_rows_of_a_mean_keep_micro_batches_of_their_size_and_are_no_slower(lengths, per_rank, num_ranks):
    num_rows = 24 // (per_rank * num_ranks)
    sizes = [num_rows] * (per_rank * num_ranks)
    lengths = lengths[: sum(sizes)]
    cost, speeds = CostModel(32.0, 0.0), (1.0,) * num_ranks
    plan = balance_step(lengths, sizes, Balance(cost, speeds), regroup=False)
    pieces = [piece for share in plan for piece in share]
    assert sorted(p for piece in pieces for p in piece.positions) == list(range(len(lengths)))
    assert {(len(piece.positions), piece.share) for piece in pieces} == {(num_rows, 1.0)}
    in_order = [[list(p.positions) for p in share] for share in deal_step(sizes, num_ranks, regroup=False)]
    mine = [[list(p.positions) for p in share] for share in plan]
    assert slowest_time(mine, lengths, speeds, cost) <= slowest_time(in_order, lengths, speeds, cost) * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [[4, 4, 2], [4, 4, 4], [6]])
def test_rows_of_a_mean_are_dealt_in_order_where_micro_batches_are_shared_or_unequal(sizes):
    lengths = list(range(sum(sizes)))
    plan = balance_step(lengths, sizes, Balance(CostModel(32.0, 0.0), (1.0, 1.0)), regroup=False)
    assert plan == deal_step(sizes, 2, regroup=False)
