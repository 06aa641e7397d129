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


@pytest.mark.parametrize("compression", ["bf16", "fp16", "powersgd"])
def test_compressed_gradients_leave_the_replicas_equal(tmp_path, compression):
    environment = {"UNSLOTH_MULTIGPU_GRAD_COMPRESSION": compression, "UNSLOTH_MULTIGPU_VERIFY_EVERY": "1"}
    out = tmp_path / "log.json"
    run = run_python([SCRIPT, "--num-gpus", "2", "--out", out], cwd=tmp_path, env={**VISIBLE, **environment})
    assert run.code == 0, run.err
