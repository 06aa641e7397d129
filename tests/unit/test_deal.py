"""How a step's samples are dealt: properties of every plan, and the words in which it is shown."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsloth_multigpu.deal.deal import check_divisible, deal_step, equation
from unsloth_multigpu.errors import ConfigError

# Micro-batches of one process: full ones, and now and then ragged or short ones.
SIZES = st.one_of(
    st.builds(lambda size, count: [size] * count, st.integers(1, 9), st.integers(1, 9)),
    st.builds(
        lambda size, count, last: [size] * count + [min(last, size)],
        st.integers(1, 9),
        st.integers(0, 8),
        st.integers(1, 9),
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
)
RANKS = st.integers(1, 9)
REGROUP = st.booleans()


def rows(pieces):
    return [p for piece in pieces if not piece.is_filler for p in piece.positions]


@given(SIZES, RANKS, REGROUP)
def test_plan_deals_every_sample_once_and_in_order(sizes, world_size, regroup):
    plan = deal_step(sizes, world_size, regroup=regroup)
    assert [p for share in plan for p in rows(share)] == list(range(sum(sizes)))
    assert len(plan) == world_size
    assert all(share for share in plan)
    assert all(piece.positions for share in plan for piece in share)


@given(SIZES, RANKS, REGROUP)
def test_rank_without_samples_has_one_filler_that_counts_nothing(sizes, world_size, regroup):
    plan = deal_step(sizes, world_size, regroup=regroup)
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
    for share in plan:
        for piece in share:
            if not piece.is_filler:
                reference = next(i for i, end in enumerate(ends) if piece.positions[0] < end)
                assert piece.reference == reference
                assert piece.positions[-1] < ends[reference]
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
        ([4, 4, 4, 4], 2, False, "16 = 2 ranks x 4 samples x 2 accumulation"),
        ([8], 2, False, "8 = 2 ranks x 4 samples x 1 accumulation"),
        ([4, 4], 1, True, "8 = 4 samples x 2 accumulation"),
        ([4, 3], 1, False, "7 = 7 samples on 1 rank"),
        ([10], 3, True, "10 = 3 + 3 + 4 samples on 3 ranks"),
        ([2, 2, 1], 2, False, "5 = 2 + 3 samples on 2 ranks"),
        ([4, 4, 4], 2, False, "12 = 6 + 6 samples on 2 ranks"),
    ],
)
def test_equation_shows_the_step(sizes, world_size, regroup, text):
    assert equation(sizes, world_size, regroup=regroup) == text


def test_step_with_fewer_samples_than_ranks_is_an_error():
    with pytest.raises(ConfigError, match=r"An optimizer step of 3 sample\(s\) cannot be shared by 4 ranks") as error:
        check_divisible(3, 4)
    check_divisible(4, 4)
    hint = "Hint: Set num_gpus=3 (of all nodes together), or raise per_device_train_batch_size"
    assert f"{hint} or gradient_accumulation_steps to 4 samples" in str(error.value)
