"""Parameters that become trainable or frozen while a training runs: as in one process, or found in the same step."""

from pathlib import Path

import pytest

from tests.helpers.outcome import distance, outcome
from tests.helpers.run import BARE, run_python

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parent / "scripts" / "trainable.py"
EXACT = ["searching", "turning"]
ON_TWO = [*EXACT, "unfreezing", "freezing", "within", "beside"]
LAYER = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainable")
    for num_ranks, jobs in ((1, EXACT), (2, ON_TWO)):
        run = run_python([SCRIPT, str(num_ranks), path / str(num_ranks), *jobs], path, BARE)
        (path / f"{num_ranks}.txt").write_text(run.err)
        assert run.code == (0 if num_ranks == 1 else 77), run.err
    return path


@pytest.mark.parametrize("job", EXACT)
def test_layers_are_unfrozen_and_frozen_as_in_one_process(folder, job):
    (one, weights), (many, of_ranks) = outcome(folder / "1", job), outcome(folder / "2", job)
    assert many["error"] is None
    assert len(one["grad_norm"]) == 12
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert distance(weights, of_ranks) < 1e-6
    assert distance(of_ranks, outcome(folder / "2", job, rank=1)[1]) == 0


@pytest.mark.parametrize(
    ("job", "error"),
    [
        ("unfreezing", "became trainable after step 2, but strategy='ddp' exchanges what was trainable when"),
        ("freezing", "became frozen after step 0, and DDP waits for its gradient."),
    ],
)
def test_change_that_ddp_cannot_follow_ends_the_training_with_what_to_set(folder, job, error):
    facts = outcome(folder / "2", job)[0]
    assert error in facts["error"]
    assert "ddp_find_unused_parameters=True" in facts["error"]


def test_layer_that_is_unfrozen_within_a_step_ends_the_training_before_the_step(folder):
    facts = outcome(folder / "2", "within")[0]
    assert facts["error"].startswith(LAYER)
    assert "became trainable or frozen within step 3: its gradient" in facts["error"]
    assert facts["saved"] == ["checkpoint-1", "checkpoint-2"]


def test_parameter_that_only_the_optimizer_has_is_found_after_the_first_step(folder):
    facts = outcome(folder / "2", "beside")[0]
    assert "after step 1: rank 0 and rank 1 differ in 1 of" in facts["error"]
    assert "of the optimizer's group 2, which is not in the model" in facts["error"]
    assert facts["saved"] == []
