"""How completions are dealt to ranks: steps and generations keep their number, or numbers that work are named."""

import functools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.notebook_shape import notebook_shapes
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.step.deal import check_divisible
from unsloth_multigpu.step.generation import (
    GenerationShape,
    arguments_of_one_process,
    divide_generation,
    divided_arguments,
    draws_completions,
)

SMALL = st.integers(1, 12)


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_eight_completions_are_shared_by_up_to_eight_ranks(batch, accumulation, world_size):
    mine = divide_generation(GenerationShape(batch, accumulation, accumulation), world_size)
    assert world_size * mine.batch * mine.accumulation == 8
    assert mine.accumulation == mine.generation_steps
    assert mine.batch == min(batch, 8 // world_size)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(SMALL, SMALL, SMALL, SMALL)
def test_steps_and_generations_keep_their_completions_or_are_refused(batch, accumulation, steps, world_size):
    one = GenerationShape(batch, accumulation, steps)
    # Every micro-batch that would do.
    fits = [
        b
        for b in range(1, batch + 1)
        if batch * accumulation % (b * world_size) == 0 and batch * steps % (b * world_size) == 0
    ]
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
        share = functools.partial(check_divisible, batch * accumulation)
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
    one = GenerationShape(2, 6, 6)
    divided = divided_arguments(one, divide_generation(one, 4))
    mine = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "steps_per_generation": 3, "seed": 1}
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6, "steps_per_generation": 6, "seed": 1}
    assert arguments_of_one_process(mine, divided) == given
    assert arguments_of_one_process({**mine, "gradient_accumulation_steps": 5}, divided) == {
        **given,
        "gradient_accumulation_steps": 5,
    }
    assert arguments_of_one_process(mine, {}) == mine


@pytest.mark.parametrize(
    ("facts", "draws"),
    [
        ({"lmbda": 0.5}, True),
        ({"lmbda": 0.0, "seq_kd": True}, True),
        ({"lmbda": 0.0, "seq_kd": False}, False),
    ],
)
def test_distillation_on_completions_of_its_own_is_known(facts, draws):
    trainer = SimpleNamespace(args=SimpleNamespace(), generate_on_policy_outputs=print, **facts)
    assert draws_completions(trainer) == draws
