"""Ranks whose weights differ are stopped at the next check; a communication hook keeps the ranks equal."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "replicas.py"
pytestmark = pytest.mark.slow

EXACT = {"verify_every": 1, "max_steps": 14}
# Several in one process group. The last one ends the run.
RUNS = {
    "start": {"plant": "start"},
    "scale": {"plant": "scale"},
    "none": EXACT,
    "fp16": {**EXACT, "hook": "FP16"},
    "last_step": {"plant": "flip", "verify_every": 100, "max_steps": 3},
}
HINT = "Or look for code that changes weights or gradients on one rank only"


def run(folder, num_ranks, **lines):
    arguments = [f"{name}={json.dumps(line)}" for name, line in lines.items()]
    return run_python([SCRIPT, str(num_ranks), *arguments], folder, BARE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    return folder, run(folder, 2, **RUNS)


@pytest.fixture(scope="module")
def lines(trained):
    """What the user read of each training."""
    _, *parts = re.split(r"\[training (\w+)\]\n", trained[1].err)
    assert parts[::2] == list(RUNS), trained[1].err
    return dict(zip(parts[::2], parts[1::2], strict=True))


def facts(trained, name, rank=0):
    return json.loads((trained[0] / f"facts_{name}_{rank}.json").read_text())


def saved_in(folder, name):
    return {path.name for path in (folder / f"checkpoints_{name}").glob("checkpoint-*")}


@pytest.mark.parametrize(
    ("plant", "step", "message", "since"),
    [
        (
            "start",
            1,
            "rank 1 differs from rank 0 in 8 of 21 trainable tensors: model.layers.0.self_attn.q_proj.weight, "
            "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight, "
            "model.layers.0.self_attn.o_proj.weight and 4 more",
            "It is the first check.",
        ),
        (
            "scale",
            4,
            "rank 1 differs from rank 0 in 1 of 21 trainable tensors: lm_head.weight",
            "All ranks were equal after step 2.",
        ),
    ],
)
def test_planted_divergence_is_caught_at_the_next_check(trained, plant, step, message, since):
    for rank in range(2):
        found = facts(trained, plant, rank)
        assert f"DivergenceError: The ranks' replicas differ after step {step}: {message}. {since}" in found["error"]
        assert HINT in found["error"]
        assert found["exit_code"] == 77
        assert len(found["norms"]) == step - 1  # That of the step is logged behind the check.
    assert saved_in(trained[0], plant) == set()


@pytest.mark.thorough
def test_rank_that_differs_from_the_others_is_named_and_ends_the_run(tmp_path):
    found = run(tmp_path, 3, flip={"plant": "flip"})
    assert found.code == 77, found.err
    named = "rank 2 differs from rank 0 in 1 of 21 trainable tensors: model.layers.0.input_layernorm.weight"
    since = "All ranks were equal after step 2."
    assert f"DivergenceError: The ranks' replicas differ after step 4: {named}. {since}" in found.err
    assert HINT in found.err
    assert not list(tmp_path.glob("facts_*"))
    # The state that was found to be different is not saved.
    assert saved_in(tmp_path, "flip") == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}


def test_last_step_is_compared_although_none_is_due(trained, lines):
    folder, ended = trained
    assert ended.code == 77, ended.err
    assert "All ranks were equal after step 2." in lines["last_step"]
    assert not list(folder.glob("facts_last_step_*"))


@pytest.fixture(scope="module")
def norms(trained):
    """Gradient norms of 14 steps with and without a hook, with every step compared."""
    result = {}
    for name in ("none", "fp16"):
        found = facts(trained, name)
        assert "error" not in found
        # What DDP was told of the model, in a real training.
        assert found["ddp"] == {"find_unused_parameters": False, "bucket_view": True}
        result[name] = found["norms"]
        assert len(result[name]) == EXACT["max_steps"]
    return result


def test_fp16_gradients_are_near_and_not_equal(norms):
    assert norms["fp16"] == pytest.approx(norms["none"], rel=2e-3)
    assert norms["fp16"] != norms["none"]
