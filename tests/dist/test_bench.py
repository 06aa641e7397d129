"""`unsloth-multigpu bench` as a user runs it, with a tiny model."""

from __future__ import annotations

import json

import pytest

from tests.helpers.run import light, orphans, run_well

LIBRARIES = light("rich", "triton")


def bench(folder, *options, **env):
    """Of a tiny model: what its output says, and what it said meanwhile."""
    quick = ["--repeats", "1", "--steps", "2", "--lengths", "lognormal:20:80", "--batch-size", "4", "--json"]
    command = ["-m", "unsloth_multigpu", "bench", "--device", "cpu", "--model-size", "tiny"]
    run = run_well([*command, *quick, *options], folder, env)
    return json.loads(run.out), run.err


def micro_batches(outcome, name):
    """Of each step of its first rank."""
    return [len(step["micro_batches"]) for step in outcome["runs"][name][0][0]["steps"]]


@pytest.mark.slow
def test_bench_compares_the_arms(tmp_path):
    home = tmp_path / "tmp"
    home.mkdir()
    options = ["--arms", "one_process,ours", "--train", "lora", "--dtype", "bf16", "--accumulation", "2"]
    options += ["--gradient-checkpointing", "--steps", "1", "--warmup", "1"]
    outcome, said = bench(tmp_path, *options, **LIBRARIES, TMPDIR=str(home))
    one, ours = outcome["results"]
    assert ours["has_same_samples"]
    assert ours["norm_difference"] < 2e-2
    assert ours["padding_share"]["median"] < one["padding_share"]["median"]
    assert one["waiting_share"]["median"] == 0.0
    assert all(r["tokens_per_s"]["low"] > 0 for r in outcome["results"])
    assert all(r["peak_bytes"] > 2**27 for r in outcome["results"])
    planner = {name: rounds[0][0]["planner"] for name, rounds in outcome["runs"].items()}
    assert planner["ours"]["overhead_tokens"] == 32.0
    assert planner["ours"]["speeds"] == [1.0, 1.0]
    assert planner["one_process"] == {}
    assert micro_batches(outcome, "one_process") == [4, 4]
    for text in ("accumulation=2,", "scripts for one GPU accumulate 4", "dtype=bf16,", "train=lora,", "device: cpu"):
        assert any(text in line for line in outcome["conditions"]), text
    assert said.count("round 1/1, ") == 2
    assert list(home.iterdir()) == []
    assert orphans(str(home)) == []


@pytest.mark.thorough
@pytest.mark.slow
def test_bench_trains_with_unsloth(tmp_path):
    options = ["--library", "unsloth", "--train", "lora", "--gradient-checkpointing", "--arms", "one_process,ours"]
    outcome, _ = bench(tmp_path, *options, "--warmup", "1", "--model-size", "64x1", TMPDIR=str(tmp_path))
    one, ours = outcome["results"]
    assert ours["has_same_samples"]
    assert ours["norm_difference"] < 1e-5
    # Dealt by length, as with the plain Trainer.
    assert ours["padding_share"]["median"] < one["padding_share"]["median"]
    assert any("library=unsloth," in line for line in outcome["conditions"])
    assert list(tmp_path.glob("unsloth_multigpu_*")) == []


@pytest.mark.thorough
@pytest.mark.slow
def test_bench_compares_the_other_arms(tmp_path):
    # Among them one process with replicas, two ranks that meet in each step, and two that meet in every fourth.
    arms = "one_process,torchrun,ours_off,rebalance,ours_one,guarded_one,legacy,allreduce,local_sgd"
    outcome, _ = bench(tmp_path, "--arms", arms, "--steps", "3", "--accumulation", "2", **LIBRARIES)
    results = {r["name"]: r for r in outcome["results"]}
    assert list(results) == arms.split(",")
    assert [len(outcome["runs"][name][0]) for name in results] == [1, 2, 2, 2, 1, 1, 1, 2, 2]
    for name, result in results.items():
        assert result["has_same_samples"], name
        assert name == "local_sgd" or result["norm_difference"] < 1e-5, name
    assert results["local_sgd"]["norm_difference"] is None
    # A script for one GPU accumulates what two ranks do together.
    assert [micro_batches(outcome, name) for name in ("one_process", "torchrun")] == [[4] * 5, [2] * 5]
    assert results["rebalance"]["padding_share"]["median"] < results["torchrun"]["padding_share"]["median"]
    assert results["ours_one"]["padding_share"]["median"] < results["one_process"]["padding_share"]["median"]
    # Weights to the second device and gradients back, in each micro-batch; two ranks send gradients once a step.
    sent = {name: result["sent_bytes_per_step"] for name, result in results.items()}
    assert sent["one_process"] == 0
    assert 0 < 2 * sent["allreduce"] < sent["legacy"]
    assert 0 < sent["local_sgd"] < sent["allreduce"]
