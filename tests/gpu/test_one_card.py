"""Two ranks that share one card over gloo, and the planner that is calibrated on it. Needs a GPU."""

import json
import os

import pytest
import torch

from tests.helpers.run import run_python

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
VISIBLE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
BENCH = ["-m", "unsloth_multigpu.cli.main", "bench", "--device", "cuda", "--model-size", "small", "--repeats", "1"]


@pytest.mark.parametrize("training", ["full", "lora"])
def test_two_ranks_on_one_card_give_the_gradients_of_one(tmp_path, training):
    arms = ["--arms", "one_process,ours,ours_one,torchrun", "--train", training]
    steps = ["--warmup", "2", "--steps", "4", "--json", "bench.json"]
    run = run_python([*BENCH, *arms, *steps], tmp_path, VISIBLE)
    assert run.code == 0, run.err
    results = {r["name"]: r for r in json.loads((tmp_path / "bench.json").read_text())["results"]}
    assert all(r["has_same_samples"] for r in results.values())
    for name in ("ours", "ours_one", "torchrun"):
        assert results[name]["norm_difference"] < 1e-4, name
    assert results["ours"]["padding_share"]["median"] < results["torchrun"]["padding_share"]["median"]
