"""Where the pieces of a step belong in the one-process run, and which buffers are kept equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unsloth_multigpu.step.deal import Piece, deal_step
from unsloth_multigpu.train.buffer import Place, kept_buffers, place_of

SIZES = st.builds(lambda size, count, last: [size] * count + [min(last, size)], *[st.integers(1, 6)] * 3)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(SIZES, st.integers(1, 6), st.booleans())
def test_plan_is_whole_where_its_pieces_are_the_micro_batches(sizes, world_size, regroup):
    plan = deal_step(sizes, world_size, regroup=regroup)
    pieces = [p for share in plan for p in share if not p.is_filler]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    micro_batches = [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    places = [place_of(p, max(sizes), len(sizes)) for p in pieces]
    assert all(place.is_whole for place in places) == ([p.positions for p in pieces] == micro_batches)
    if all(place.is_whole for place in places):
        assert places == [Place(i, 1.0, True) for i in range(len(sizes))]
    assert all(0 <= place.reference < len(sizes) for place in places)


@pytest.mark.parametrize(
    ("piece", "place"),
    [
        # Rows that were exchanged between micro-batches.
        (Piece((3, 5, 9), work=4.0), Place(1, 1.0, False)),
        (Piece((4, 5, 6, 7), work=4.0), Place(1, 1.0, True)),
        # Of micro-batches of different sizes, which are kept apart.
        (Piece((7, 8), share=1.0, reference=2), Place(2, 1.0, True)),
        (Piece((7, 8), share=0.5, reference=2), Place(2, 0.5, False)),
    ],
)
def test_place_of_a_piece(piece, place):
    found = place_of(piece, 4, 4)
    assert (found.reference, found.is_whole) == (place.reference, place.is_whole)


def test_kept_buffers_are_those_of_a_checkpoint():
    model = torch.nn.Module()
    model.inner = torch.nn.BatchNorm1d(2)
    model.register_buffer("table", torch.zeros(3), persistent=False)
    model.register_buffer("placeholder", torch.zeros(3, device="meta"))
    model.register_buffer("ignored", torch.zeros(3))
    model._ddp_params_and_buffers_to_ignore = ["ignored"]
    names = [name for name, *_ in kept_buffers(model)]
    assert names == ["inner.running_mean", "inner.running_var", "inner.num_batches_tracked"]
