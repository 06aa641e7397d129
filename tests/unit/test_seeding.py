"""Seeds of the global random generators: which of them the script has set itself."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from unsloth_multigpu.launch.seeding import generator_digests, seed_unseeded


@pytest.fixture(autouse=True)
def kept() -> object:
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def test_seeds_of_the_script_stay() -> None:
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    told = generator_digests()
    seed_unseeded(9, told)
    kept = draws()
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    assert draws() == kept
    # One of them alone.
    random.seed(1)
    seed_unseeded(9, told)
    assert random.random() == kept[0]
    random.seed(2)
    seed_unseeded(9, told)
    random_of_run = random.random()
    random.seed(9)
    assert random.random() == random_of_run
