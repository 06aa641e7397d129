"""Two cards over NCCL give the training of one card. Needs a machine with two GPUs."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.helpers.run import run_python

SCRIPT = Path(__file__).parents[1] / "dist" / "scripts" / "tiny_train.py"
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
VISIBLE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")}


def grad_norms(folder, num_gpus, *options):
    out = folder / f"log_{num_gpus}.json"
    run = run_python([SCRIPT, "--num-gpus", str(num_gpus), "--out", out, *options], cwd=folder, env=VISIBLE)
    assert run.code == 0, run.err
    return [h["grad_norm"] for h in json.loads(out.read_text())["log"] if "grad_norm" in h]


@pytest.mark.parametrize("rows", ["24", "26"])
def test_two_cards_train_as_one(tmp_path, rows):
    one, two = (grad_norms(tmp_path, n, "--rows", rows, "--batch-size", "5") for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-4)


def test_doctor_finds_no_fault(tmp_path):
    run = run_python(["-m", "unsloth_multigpu.cli.main", "doctor"], cwd=tmp_path, env=VISIBLE)
    assert run.code == 0, run.out
