"""How a step's samples are dealt, what a micro-batch costs, and what every plan keeps and is better at."""

import random
import statistics
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refused import refused
from unsloth_multigpu.deal.deal import Balance, balance_step, check_enough_samples, deal_step, equation, in_lockstep
from unsloth_multigpu.deal.plan import CostModel, fit_cost, plan_step, relative_speeds, step_time, without_outliers
from unsloth_multigpu.errors import ConfigError

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


def assert_is_no_slower(plan, in_order, lengths, speeds, cost, **options):
    after, before = (step_time(parts_of(p), lengths, speeds, cost, **options) for p in (plan, in_order))
    assert after <= before * (1 + 1e-9)


def parts_of(plan):
    return [[list(piece.positions) for piece in share if not piece.is_filler] for share in plan]


@given(steps(), SPEEDS, COSTS)
def test_plan_has_every_sample_once_and_is_neither_slower_nor_larger_than_dealing_in_order(step, speeds, cost):
    lengths, sizes = step
    plan = balance_step(lengths, sizes, Balance(cost, speeds), regroup=True)
    assert rows_of(plan) == list(range(len(lengths)))
    assert len(plan) == len(speeds)
    assert all(share for share in plan)
    fillers = [piece for share in plan for piece in share if piece.is_filler]
    assert len(fillers) == max(0, len(speeds) - len(lengths))
    assert all(lengths[f.positions[0]] == min(lengths) and f.share == 0 for f in fillers)
    in_order = deal_step(sizes, len(speeds), regroup=True)
    assert_is_no_slower(plan, in_order, lengths, speeds, cost)
    # The most tokens that a micro-batch dealt in order could have.
    dealt = [part for share in parts_of(in_order) for part in share]
    most = max(sum(lengths[i] for i in part) for part in dealt)
    most = max(map(len, dealt)) * cost.padded(max(lengths)) if cost.is_padded else most
    assert max(cost.tokens([lengths[i] for i in part]) for share in parts_of(plan) for part in share) <= most


@given(steps(), SPEEDS, st.booleans())
def test_plan_for_unknown_costs_has_no_more_micro_batches_than_dealing_in_order(step, speeds, is_padded):
    lengths, sizes = step
    cost = CostModel(128.0, 512.0, is_padded=is_padded, is_unknown=True)
    plan = balance_step(lengths, sizes, Balance(cost, speeds), regroup=True)
    assert rows_of(plan) == list(range(len(lengths)))
    plans = (plan, deal_step(sizes, len(speeds), regroup=True))
    after, before = (max(len(share) / s for share, s in zip(parts_of(p), speeds, strict=True)) for p in plans)
    assert after <= before


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
        planned = step_time(plan, lengths, speeds, cost)
        # No plan can do less than the rows alone, shared out evenly, or than the longest row.
        ideal = max(sum(map(cost.row_work, lengths)) / num_ranks, cost.row_work(max(lengths)))
        over_ideal.append(planned / ideal)
        gains.append(step_time(in_order, lengths, speeds, cost) / planned)
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
    assert step_time(plan, [8, 2, 5], (1.0, 1.0), plain, is_lockstep=True) == 8 + 2
    assert step_time(plan, [8, 2, 5], (1.0, 0.5), plain, is_lockstep=True) == 10 + 4


@given(steps(), st.integers(2, 4), COSTS)
def test_lockstep_has_equally_many_micro_batches_and_is_not_slower(step, world_size, cost):
    lengths, sizes = step
    speeds = (1.0,) * world_size
    planned = balance_step(lengths, sizes, Balance(cost, speeds), regroup=True, is_lockstep=True)
    in_order = deal_step(sizes, world_size, regroup=True)
    assert_is_no_slower(planned, in_order, lengths, speeds, cost, is_lockstep=True)
    plan = in_lockstep(planned, whole=False)
    assert len({len(share) for share in plan}) == 1
    assert rows_of(plan) == list(range(len(lengths)))
    for share in plan:
        # Fillers first: gradients meet in the last micro-batch.
        assert share == sorted(share, key=lambda piece: (not piece.is_filler, piece.work))
        assert all(piece.share == 0 for piece in share if piece.is_filler)


def test_filler_is_a_whole_micro_batch_where_these_are_never_cut():
    plan = in_lockstep(deal_step([3, 3, 2], 2, regroup=False, whole=True), whole=True)
    (filler,) = [piece for share in plan for piece in share if piece.is_filler]
    assert filler.positions == (6, 7)
    one_row = in_lockstep(deal_step([3, 3, 2], 2, regroup=False), whole=False)
    assert all(len(piece.positions) == 1 for share in one_row for piece in share if piece.is_filler)


@given(st.lists(st.integers(1, 900), min_size=24, max_size=24), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_rows_of_a_mean_keep_micro_batches_of_their_size_and_are_no_slower(lengths, per_rank, num_ranks):
    num_rows = 24 // (per_rank * num_ranks)
    sizes = [num_rows] * (per_rank * num_ranks)
    lengths = lengths[: sum(sizes)]
    cost, speeds = CostModel(32.0, 0.0), (1.0,) * num_ranks
    plan = balance_step(lengths, sizes, Balance(cost, speeds), regroup=False)
    assert rows_of(plan) == list(range(len(lengths)))
    assert {(len(piece.positions), piece.share) for share in plan for piece in share} == {(num_rows, 1.0)}
    assert_is_no_slower(plan, deal_step(sizes, num_ranks, regroup=False), lengths, speeds, cost)


@pytest.mark.parametrize("sizes", [[4, 4, 2], [4, 4, 4], [6]])
def test_rows_of_a_mean_are_dealt_in_order_where_micro_batches_are_shared_or_unequal(sizes):
    lengths = list(range(sum(sizes)))
    plan = balance_step(lengths, sizes, Balance(CostModel(32.0, 0.0), (1.0, 1.0)), regroup=False)
    assert plan == deal_step(sizes, 2, regroup=False)


@pytest.mark.parametrize(
    ("options", "lengths", "cost", "num_tokens"),
    [
        # Padded rows cost as the longest, rows end to end what they are, and few of them the floor.
        ({"floor_tokens": 0, "attention": 0.01}, [100, 50, 1], 10 + 3 * (100 + 0.01 * 100**2), 300),
        ({"is_padded": False, "attention": 0.01}, [100, 50], 10 + 150 + 0.01 * (100**2 + 50**2), 150),
        ({"floor_tokens": 500}, [10], 510, 10),
        ({"floor_tokens": 500}, [600], 610, 600),
    ],
)
def test_micro_batch_costs_what_its_rows_take(options, lengths, cost, num_tokens):
    model = CostModel(overhead_tokens=10, **options)
    assert (model.of(lengths), model.tokens(lengths)) == (cost, num_tokens)


def test_one_slow_micro_batch_changes_nothing():
    samples = [(float(w), (32 + w) * 1e-5) for w in range(50, 3000, 100)]
    assert fit_cost(CostModel(), [*samples, (60.0, 5.0)]) == fit_cost(CostModel(), samples)
    assert without_outliers(CostModel(), [*samples, (60.0, 5.0)]) == samples


@pytest.mark.parametrize(
    ("rates", "speeds"),
    [
        ([100.0, 88.0], (1.0, 1.0)),
        ([100.0, 84.0], (1.0, 0.85)),
        ([33.0, 100.0, 71.0], (0.35, 1.0, 0.7)),
        ([100.0, 0.0], (1.0, 1.0)),
        ([100.0, 0.1], (1.0, 0.05)),
    ],
)
def test_speeds_are_rounded_and_equal_where_nearly_so(rates, speeds):
    assert relative_speeds(rates) == pytest.approx(speeds)


# Micro-batches of one process: full ones, and now and then ragged or short ones.
RANKS = st.integers(1, 9)
SIZES = st.one_of(
    st.builds(lambda size, count: [size] * count, RANKS, RANKS),
    st.builds(lambda size, count, last: [size] * count + [min(last, size)], RANKS, st.integers(0, 8), RANKS),
    st.lists(RANKS, min_size=1, max_size=9),
)


def rows(pieces):
    return [p for piece in pieces if not piece.is_filler for p in piece.positions]


@given(SIZES, RANKS, st.booleans())
def test_plan_deals_every_sample_once_and_in_order_and_a_rank_without_one_gets_a_filler(sizes, world_size, regroup):
    plan = deal_step(sizes, world_size, regroup=regroup)
    assert [p for share in plan for p in rows(share)] == list(range(sum(sizes)))
    assert len(plan) == world_size
    assert all(share for share in plan)
    fillers = [share for share in plan if any(piece.is_filler for piece in share)]
    assert bool(fillers) == (sum(sizes) < world_size)
    for share in fillers:
        assert [(piece.share, piece.positions) for piece in share] == [(0.0, (0,))]


@given(SIZES, RANKS)
def test_ranks_meet_in_equal_parts_of_each_micro_batch_or_in_none(sizes, world_size):
    plan = deal_step(sizes, world_size, regroup=False, in_each=True)
    if any(size % world_size for size in sizes):
        assert plan == deal_step(sizes, world_size, regroup=False, whole=True)
        return
    assert sorted(p for share in plan for p in rows(share)) == list(range(sum(sizes)))
    for share in plan:
        assert [piece.reference for piece in share] == list(range(len(sizes)))
        assert [len(piece.positions) * world_size for piece in share] == sizes
        assert {piece.share for piece in share} == {1 / world_size}


@given(SIZES, RANKS)
def test_regrouped_ranks_and_their_pieces_are_as_few_and_as_even_as_can_be(sizes, world_size):
    plan = deal_step(sizes, world_size, regroup=True)
    of_ranks = [len(rows(share)) for share in plan]
    assert max(of_ranks) - min(of_ranks) <= 1
    for share in plan:
        lengths = [len(piece.positions) for piece in share]
        assert len(share) == max(1, -(-len(rows(share)) // max(sizes)))
        assert max(lengths) - min(lengths) <= 1


@given(SIZES, RANKS)
def test_ungrouped_piece_lies_within_one_reference_and_counts_its_part(sizes, world_size):
    ends, plan = list(accumulate(sizes)), deal_step(sizes, world_size, regroup=False)
    assert sum(piece.share for share in plan for piece in share) == pytest.approx(len(sizes))
    for piece in (piece for share in plan for piece in share if not piece.is_filler):
        reference = next(i for i, end in enumerate(ends) if piece.positions[0] < end)
        assert (piece.reference, piece.positions[-1] < ends[reference]) == (reference, True)
        assert piece.share == pytest.approx(len(piece.positions) / sizes[reference])


@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=24, max_size=24), st.integers(1, 6))
def test_ungrouped_references_that_divide_stay_whole(per_rank, lengths, world_size):
    sizes = lengths[: per_rank * world_size]
    plan = deal_step(sizes, world_size, regroup=False)
    assert [len(share) for share in plan] == [per_rank] * world_size
    assert [len(piece.positions) for share in plan for piece in share] == sizes
    assert all(piece.share == 1.0 for share in plan for piece in share)


@pytest.mark.parametrize(
    ("sizes", "world_size", "regroup", "text"),
    [
        ([8, 8], 2, True, "16 = 2 ranks x 8 samples x 1 accumulation"),
        ([4, 4, 4, 4], 2, True, "16 = 2 ranks x 4 samples x 2 accumulation"),
        ([4, 4], 1, True, "8 = 4 samples x 2 accumulation"),
        ([4, 3], 1, False, "7 = 7 samples on 1 rank"),
        ([10], 3, True, "10 = 3 + 3 + 4 samples on 3 ranks"),
        ([4, 4, 4], 2, False, "12 = 6 + 6 samples on 2 ranks"),
    ],
)
def test_equation_shows_the_step(sizes, world_size, regroup, text):
    assert equation(sizes, deal_step(sizes, world_size, regroup=regroup)) == text


def test_step_with_fewer_samples_than_ranks_is_an_error():
    hint = "Set num_gpus=3 (of all nodes together), or raise per_device_train_batch_size or grad"
    with refused(ConfigError, "An optimizer step of 3 sample(s) cannot be shared by 4 ranks", hint) as error:
        check_enough_samples(3, 4)
    assert "gradient_accumulation_steps to 4 samples" in error.value.hint
    check_enough_samples(4, 4)
    check_enough_samples(2, 2, num_sharing=2)
    with pytest.raises(ConfigError, match=r"1 sample.* cannot be shared by 4 ranks") as error:
        check_enough_samples(1, 2, num_sharing=2)
    assert error.value.most_ranks == 2
