"""Parameters that become trainable or frozen while a training runs: as in one process, or found in the same step."""

from pathlib import Path

import pytest

from tests.helpers.outcome import assert_trained_as_one, distance, outcome
from tests.helpers.run import BARE, run_python

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parent / "scripts" / "trainable.py"
EXACT = ["unfreezing", "forgetting", "freezing", "beside"]
ON_TWO = [*EXACT, "renewing", "within"]
LAYER = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainable")
    for num_ranks, jobs in ((1, EXACT), (2, [*ON_TWO, "one_rank"])):
        run = run_python([SCRIPT, str(num_ranks), path / str(num_ranks), *jobs], path, BARE)
        (path / f"{num_ranks}.txt").write_text(run.err)
        assert run.code == (0 if num_ranks == 1 else 77), run.err
    return path


@pytest.mark.parametrize("job", EXACT)
def test_layers_are_unfrozen_and_frozen_as_in_one_process(folder, job):
    one, many, _ = assert_trained_as_one(folder / "1", folder / "2", job)
    assert many["error"] is None
    assert len(one["grad_norm"]) == 12


def test_layer_that_is_set_again_begins_with_rank_0s_numbers(folder):
    (first, weights), (_, others) = (outcome(folder / "2", "renewing", rank) for rank in range(2))
    assert first["error"] is None
    assert distance(weights, others) == 0


def test_layer_that_is_unfrozen_within_a_step_ends_the_training_before_the_step(folder):
    facts = outcome(folder / "2", "within")[0]
    assert facts["error"].startswith(LAYER)
    assert "became trainable or frozen within step 3: its gradient" in facts["error"]
    assert facts["saved"] == ["checkpoint-1", "checkpoint-2"]


def test_layer_that_one_rank_unfreezes_is_named(folder):
    text = (folder / "2.txt").read_text()
    assert f"DivergenceError: After step 2 {LAYER}" in text
    assert "became trainable or frozen on rank 1 and not on rank 0" in text
