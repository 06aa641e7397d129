"""Ranks whose weights differ are stopped at the next check; compressed gradients keep the ranks equal."""

import json
from pathlib import Path

import pytest

from tests.helpers.run import run_python

SCRIPT = Path(__file__).parent / "scripts" / "replicas.py"
pytestmark = pytest.mark.slow


def run(folder, num_ranks, plant, *options):
    return run_python([SCRIPT, str(num_ranks), plant, *options], cwd=folder)


@pytest.mark.parametrize(
    ("num_ranks", "plant", "step", "message", "since"),
    [
        (
            2,
            "start",
            1,
            "rank 0 and rank 1 differ in 8 of 21 trainable tensors: model.layers.0.self_attn.q_proj.weight, "
            "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight, "
            "model.layers.0.self_attn.o_proj.weight and 4 more",
            "It is the first check.",
        ),
        (
            2,
            "scale",
            4,
            "rank 0 and rank 1 differ in 1 of 21 trainable tensors: lm_head.weight",
            "All ranks were equal after step 2.",
        ),
        (
            3,
            "flip",
            4,
            "rank 2 differs from the other ranks in 1 of 21 trainable tensors: model.layers.0.input_layernorm.weight",
            "All ranks were equal after step 2.",
        ),
    ],
)
def test_planted_divergence_is_caught_at_the_next_check(tmp_path, num_ranks, plant, step, message, since):
    found = run(tmp_path, num_ranks, plant)
    assert found.code == 77, found.err
    assert f"DivergenceError: The ranks' replicas differ after step {step}: {message}. {since}" in found.err
    assert "Hint: Look for what changes weights or gradients on one rank alone" in found.err
    assert not list(tmp_path.glob("facts_*"))
    # The state that was found to be different is not saved.
    saved = {path.name for path in tmp_path.glob("checkpoints/checkpoint-*")}
    assert saved == ({"checkpoint-1", "checkpoint-2", "checkpoint-3"} if plant == "flip" else set())


def test_last_step_is_compared_although_none_is_due(tmp_path):
    found = run(tmp_path, 2, "flip", "verify_every=100")
    assert found.code == 77, found.err
    assert "All ranks were equal after step 1." in found.err


def test_divergence_goes_unseen_where_nothing_is_compared(tmp_path):
    found = run(tmp_path, 2, "scale", "verify_every=0")
    assert found.code == 0, found.err


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    """Gradient norms of 12 steps by compression, with every step compared."""
    result = {}
    for compression in ("none", "fp16", "powersgd"):
        folder = tmp_path_factory.mktemp(compression)
        options = [] if compression == "none" else [f"grad_compression={compression}"]
        # This model has one bucket, so gloo can carry powersgd for once: there is nothing to get out of order.
        plant = "one_bucket" if compression == "powersgd" else "none"
        found = run(folder, 2, plant, "verify_every=1", "max_steps=14", *options)
        assert found.code == 0, found.err
        line = f"grad_compression={compression}: gradients are sent smaller and are no longer exact"
        assert found.err.count(line) == len(options)
        facts = json.loads((folder / "facts_0.json").read_text())
        # What DDP was told of the model, in a real training.
        assert facts["ddp"] == {"find_unused_parameters": False, "bucket_view": True}
        result[compression] = facts["norms"]
    return result


def test_fp16_gradients_are_near_and_not_equal(norms):
    assert norms["fp16"] == pytest.approx(norms["none"], rel=2e-3)
    assert norms["fp16"] != norms["none"]


def test_powersgd_begins_with_the_tenth_gradient(norms):
    # The tenth backward is counted from zero; before it gradients are exact.
    assert norms["powersgd"][:10] == pytest.approx(norms["none"][:10], rel=1e-5)
    assert norms["powersgd"][10:] != pytest.approx(norms["none"][10:], rel=1e-5)
    assert norms["powersgd"][10:] == pytest.approx(norms["none"][10:], rel=0.5)


def test_second_training_of_a_trainer_is_compressed_as_the_first(tmp_path):
    found = run(tmp_path, 2, "twice", "grad_compression=fp16", "max_steps=2")
    assert found.code == 0, found.err
    assert found.err.count("grad_compression=fp16: gradients are sent smaller and are no longer exact") == 2


@pytest.mark.parametrize("compression", ["bf16", "powersgd"])
def test_compression_that_gloo_cannot_carry_is_refused_before_training(tmp_path, compression):
    found = run(tmp_path, 2, "none", f"grad_compression={compression}")
    assert found.code == 69, found.err
    assert f"grad_compression='{compression}' needs NCCL or XCCL; the gradients of this run go over gloo." in found.err
    assert "'loss'" not in found.out
