"""How completions are dealt to ranks: steps and generations keep their number, or numbers that work are named."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.notebook_shape import notebook_shapes
from unsloth_multigpu.deal.deal import check_enough_samples
from unsloth_multigpu.deal.generation import (
    GenerationShape,
    arguments_of_one_process,
    divide_arguments,
    divide_generation,
)
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.part import generates_samples
from unsloth_multigpu.step.completions import deal_completions, unknown_inputs

SMALL = st.integers(1, 12)


@settings(max_examples=300)
@given(SMALL, SMALL, SMALL, SMALL)
def test_steps_and_generations_keep_their_completions_or_are_refused(batch, accumulation, steps, world_size):
    one = GenerationShape(batch, accumulation, steps)
    # Every micro-batch that would do.
    common = batch * math.gcd(accumulation, steps)
    fits = [b for b in range(1, batch + 1) if common % (b * world_size) == 0]
    if not fits:
        with pytest.raises(ConfigError):
            divide_generation(one, world_size)
        return
    mine = divide_generation(one, world_size)
    assert mine.batch == max(fits)
    assert world_size * mine.batch * mine.accumulation == batch * accumulation
    assert world_size * mine.batch * mine.generation_steps == batch * steps


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_shape_of_the_notebooks_is_shared_by_all_ranks_or_by_the_most_that_can(world_size):
    """Unsloth's notebooks: what Unsloth makes of their arguments in one process, dealt to ranks."""
    shapes = notebook_shapes()
    assert len(shapes) > 60
    for shape in shapes:
        trainer, batch, accumulation, num_generations = shape
        share = functools.partial(check_enough_samples, batch * accumulation)
        if trainer == "GRPOTrainer":
            if batch * accumulation % num_generations:
                batch = num_generations  # As Unsloth's GRPOConfig does.
            share = functools.partial(divide_generation, GenerationShape(batch, accumulation, accumulation))
        most_ranks = _most_ranks(share, world_size)
        share(most_ranks)
        for more in range(most_ranks + 1, world_size + 1):
            assert _most_ranks(share, more) == most_ranks, shape


def _most_ranks(share, world_size):
    try:
        share(world_size)
    except ConfigError as error:
        return error.most_ranks
    return world_size


def test_refusal_names_a_batch_that_works():
    with pytest.raises(ConfigError, match="cannot be shared evenly by 2 ranks") as error:
        divide_generation(GenerationShape(3, 1, 1), 2, num_generations=3)
    assert "per_device_train_batch_size=6 works with this accumulation" in str(error.value)
    divide_generation(GenerationShape(6, 1, 1), 2, num_generations=3)
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size=8 works"):
        divide_generation(GenerationShape(6, 1, 1), 4, num_generations=4)
    with pytest.raises(ConfigError, match="x gradient_accumulation_steps=4, 2 generated at once: the completions of a"):
        divide_generation(GenerationShape(3, 4, 2), 4)


def test_arguments_read_as_they_were_given_and_what_was_changed_since_is_kept():
    args = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=6, steps_per_generation=6)
    divided = divide_arguments(args, 4, rank=1)
    mine = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "steps_per_generation": 3, "seed": 1}
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6, "steps_per_generation": 6, "seed": 1}
    assert arguments_of_one_process(mine, divided) == given
    assert {**mine, **vars(args)} == mine
    changed = {"gradient_accumulation_steps": 5}
    assert arguments_of_one_process(mine | changed, divided) == given | changed
    assert arguments_of_one_process(mine, {}) == mine


@pytest.mark.parametrize(
    ("facts", "draws"),
    [({"lmbda": 0.5}, True), ({"lmbda": 0.0, "seq_kd": True}, True), ({"lmbda": 0.0, "seq_kd": False}, False)],
)
def test_distillation_on_completions_of_its_own_is_known(facts, draws):
    trainer = SimpleNamespace(args=SimpleNamespace(), generate_on_policy_outputs=print, **facts)
    assert generates_samples(trainer) == draws


LENGTH = st.tuples(st.integers(0, 9), st.integers(0, 40))


def padded(lengths, micro_batches):
    return sum(len(part) * sum(max(lengths[i][side] for i in part) for side in (0, 1)) for part in micro_batches)


@settings(max_examples=60)
@given(st.data(), SMALL, SMALL, st.integers(1, 4))
def test_dealt_completions_keep_all_shapes_and_pad_no_more_than_the_longest(data, batch, num_micro_batches, world_size):
    count = batch * num_micro_batches * world_size
    lengths = data.draw(st.lists(LENGTH, min_size=count, max_size=count))
    plan = deal_completions(lengths, batch, world_size)
    assert [len(share) for share in plan] == [num_micro_batches] * world_size
    every = [rows for share in plan for rows in share]
    assert {len(rows) for rows in every} == {batch}
    assert sorted(i for rows in every for i in rows) == list(range(count))
    assert padded(lengths, every) <= padded(lengths, [list(range(count))])
    costs = [[padded(lengths, [rows]) for rows in share] for share in plan]
    assert all(share == sorted(share) for share in costs)


def micro_batch(**more):
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)
    names = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask}
    return {**names, "advantages": torch.ones(2), "num_items_in_batch": torch.tensor(6), **more}


LEFT_PAD = {"max_left_pad": torch.ones(2, 1)}


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({}, ""),
        ({"old_per_token_logps": torch.ones(2, 3), "ref_per_token_logps": None}, ""),
        ({"tool_mask": torch.ones(2, 3), "importance_sampling_ratio": torch.ones(2, 3)}, ""),
        ({"completion_mask": None}, "a micro-batch without 'completion_mask'"),
        ({"pixel_values": torch.ones(2, 3, 4, 4)}, "'pixel_values'"),
        ({"importance_sampling_ratio": torch.ones(2, 1)}, ""),
        ({"num_images": [1, 1]}, "'num_images'"),
        ({"patches": torch.ones(8, 3)}, "'patches'"),
        ({"advantages": torch.ones(2, 3), "new_mask": torch.ones(2, 3), "scale": torch.tensor(0.5)}, ""),
        ({"ref_per_token_logps": torch.ones(2, 5)}, "'ref_per_token_logps'"),
        (LEFT_PAD, ""),
        ({**LEFT_PAD, "old_per_token_logps": torch.ones(2, 3)}, "the layout of Unsloth's log-probabilities"),
    ],
)
def test_inputs_that_are_not_known_are_named(more, what):
    assert unknown_inputs([micro_batch(), micro_batch(**more)]) == what
