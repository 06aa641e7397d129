"""Gradient strategies inside Hugging Face's loop: those that meet in every step give DDP's result."""

import json
from pathlib import Path

import pytest

from tests.helpers.outcome import largest_difference
from tests.helpers.run import light, run_python

SCRIPT = Path(__file__).parent / "scripts" / "strategies.py"
LIBRARIES = light("datasets", "rich", "triton")
pytestmark = [pytest.mark.slow, pytest.mark.thorough]

# A checkpoint has the inner optimizer of one rank; SGD has no state.
SAVES = {"max_steps": 12, "optim": "sgd", "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 8}
# The planner measures, and no two runs measure the same.
DILOCO = {"strategy": "diloco:every_steps=4", "verify_every": 1, "balance": "off", "args": SAVES}
RUNS = {
    "ddp": {},
    "allreduce": {"strategy": "allreduce", "verify_every": 1},
    "parameter_server": {"strategy": "parameter_server", "verify_every": 1},
    "diloco": DILOCO,
    "diloco_resumed": {**DILOCO, "resume": "checkpoints_diloco/checkpoint-8"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("strategies")
    run = run_python(
        [SCRIPT, "2", *(f"{name}={json.dumps(line)}" for name, line in RUNS.items()), "ends"], path, LIBRARIES
    )
    assert run.code == 69, run.err  # The last training is refused, and the script catches the error.
    return path


def facts(folder, name):
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(2)]


def weight_difference(folder, first, second):
    return largest_difference(folder / f"{first}.safetensors", folder / f"{second}.safetensors")


def norm_difference(folder, first, second):
    one, other = facts(folder, first)[0]["grad_norm"], facts(folder, second)[0]["grad_norm"]
    assert len(one) == len(other)
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["allreduce", "parameter_server"])
def test_strategy_that_meets_in_every_step_equals_ddp(folder, name):
    assert len(facts(folder, name)[0]["grad_norm"]) == 20
    assert norm_difference(folder, "ddp", name) < 1e-5
    assert weight_difference(folder, "ddp", name) < 1e-5
    mine, other = facts(folder, name)
    assert mine["hashes"] == other["hashes"]
    assert mine["learning_rate"] == facts(folder, "ddp")[0]["learning_rate"]
    assert (facts(folder, "ddp")[0]["wrapper"], mine["wrapper"]) == (
        "DistributedDataParallel",
        "PeftModel",
    )


def test_outer_momentum_is_in_the_checkpoint(folder):
    assert weight_difference(folder, "diloco", "diloco_resumed") == 0
    assert facts(folder, "diloco_resumed")[1]["hashes"] == facts(folder, "diloco")[1]["hashes"][8:]


def test_best_checkpoint_stays_loaded(folder):
    assert [rank["best"] for rank in facts(folder, "ends")] == [0.0, 0.0]


def test_model_of_another_strategy_is_wrapped_again_or_refused(folder):
    for rank in facts(folder, "ends"):
        assert rank["ddp_after_diloco"] == ""
        assert "strategy='diloco:every_steps=4', but the model is wrapped in DDP" in rank["diloco_after_ddp"]
