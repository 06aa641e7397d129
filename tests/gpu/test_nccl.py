"""Ranks on cards of their own over NCCL train as one card does. Needs two GPUs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.gpu.card import BACKEND, IS_FAKE, needs_cards, visible
from tests.helpers.run import PLAIN, ROOT, finish, free_port, light, run_python, start
from tests.helpers.tiny import build_tiny

SCRIPTS = ROOT / "tests" / "dist" / "scripts"
pytestmark = needs_cards(2)
VISIBLE = visible(2) if not needs_cards(2).args[0] else {}
# Rows x batch size x accumulation: the second shape divides neither by the step nor by the ranks.
KINDS = ("trainer_peft", "sft_lora", "sft_full", "dpo")
JOBS = [f"{kind}:{shape}" for kind in KINDS for shape in ("24x4x2", "26x3x3")]
# Interpreted, Unsloth's kernels are too slow for these sizes: tests/e2e/test_gpu_path.py has smaller ones.
LIBRARIES = light("unsloth", "unsloth_zoo") if IS_FAKE else {}
# Unsloth's kernels compute in the card's own precision.
BOUNDS = {"trainer_peft": 1e-4, "sft_lora": 1e-2, "sft_full": 1e-2, "dpo": 1e-2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Facts of rank 0 and its weights: `trained[number of cards, job]`."""
    folder = tmp_path_factory.mktemp("nccl")
    model = build_tiny(folder / "model")
    found = {}
    for num_cards in (1, 2):
        out = folder / str(num_cards)
        arguments = ["--num-gpus", str(num_cards), "--jobs", ",".join(JOBS), "--model", model, "--out", str(out)]
        run = run_python([SCRIPTS / "parity.py", *arguments], folder, {**LIBRARIES, **visible(num_cards)})
        assert run.code == 0, run.err
        for job in JOBS:
            path = out / f"{job.replace(':', '_')}_0"
            found[num_cards, job] = (
                json.loads(path.with_suffix(".json").read_text()),
                load_file(f"{path}.safetensors"),
            )
    return found


@pytest.mark.parametrize("job", JOBS)
def test_two_cards_train_as_one(trained, job):
    bound = BOUNDS[job.partition(":")[0]]
    (one, weights), (two, replica) = (trained[num_cards, job] for num_cards in (1, 2))
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=bound)
    assert two["loss"] == pytest.approx(one["loss"], rel=bound)
    assert weights.keys() == replica.keys()
    assert max(float((weights[name].float() - replica[name].float()).abs().max()) for name in weights) < bound


@pytest.mark.parametrize("compression", ["fp16", *(["bf16", "powersgd"] if BACKEND == "nccl" else [])])
def test_compressed_gradients_leave_the_replicas_equal(tmp_path, compression):
    environment = {"UNSLOTH_MULTIGPU_GRAD_COMPRESSION": compression, "UNSLOTH_MULTIGPU_VERIFY_EVERY": "1"}
    script = [SCRIPTS / "tiny_train.py", "--num-gpus", "2", "--out", tmp_path / "log.json"]
    run = run_python(script, cwd=tmp_path, env={**PLAIN, **VISIBLE, **environment})
    assert run.code == 0, run.err


def test_killed_rank_costs_no_step(tmp_path):
    """A rank is killed behind a checkpoint; the second attempt ends with the weights of an undisturbed training."""
    line = {"lora": True, "dropout": 0.1, "args": {"gradient_accumulation_steps": 2}}
    lines = {"killed": {**line, "kill": [1, 8]}, "whole": line}
    options = {"resume": "auto", "max_restarts": 1, "balance": "off"}
    configurations = [f"{name}={json.dumps(one)}" for name, one in lines.items()]
    run = run_python([SCRIPTS / "resume.py", "2", json.dumps(options), *configurations], tmp_path, {**PLAIN, **VISIBLE})
    assert run.code == 0, run.err
    assert "resumes from checkpoints_killed/checkpoint-6" in run.err
    killed, whole = (load_file(tmp_path / f"{name}.safetensors") for name in lines)
    assert max(float((killed[name] - whole[name]).abs().max()) for name in whole) < 1e-5


# A cell, or a script. The test reads what rank 0 logged.
TRAINING = """
import json, os, sys
sys.path.insert(0, {scripts!r})
import torch
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainingArguments
torch.manual_seed(0)
arguments = TrainingArguments("checkpoints", per_device_train_batch_size=5, num_train_epochs=1, logging_steps=1,
                              save_strategy="no", report_to=[], disable_tqdm=True, learning_rate=1e-3)
trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=RaggedRows(26), data_collator=collate)
trainer.train()
if os.environ.get("RANK", "0") == "0":
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    with open({out!r}, "w") as file:
        json.dump(norms, file)
"""


def test_notebook_trains_as_one_card(tmp_path):
    pytest.importorskip("jupyter_client", reason="needs jupyter_client and ipykernel")
    pytest.importorskip("ipykernel", reason="needs jupyter_client and ipykernel")
    from tests.helpers.notebook import NotebookRun

    one, two = (str(tmp_path / f"{name}.json") for name in ("one", "two"))
    script = tmp_path / "one.py"
    script.write_text(TRAINING.format(scripts=str(SCRIPTS), out=one))
    run = run_python([script], tmp_path, {**PLAIN, **visible(1)})
    assert run.code == 0, run.err
    with NotebookRun(tmp_path, {**PLAIN, **VISIBLE}) as notebook:
        for source in (
            "import unsloth_multigpu as ump\nump.enable_multi_gpu(num_gpus=2)",
            TRAINING.format(scripts=str(SCRIPTS), out=two),
            f"import torch.distributed as dist\nassert dist.get_backend() == {BACKEND!r}",
        ):
            cell = notebook.run(source, 120.0)
            assert cell.error == "", cell.traceback
    norms = [json.loads(Path(path).read_text()) for path in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_ranks_may_see_one_card_each(tmp_path):
    """As srun binds them: both ranks' card is number 0, and the local rank of one is 1."""
    port = free_port()
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cards = [card for card in VISIBLE["CUDA_VISIBLE_DEVICES"].split(",") if card] or ["", ""]
    ranks = []
    try:
        for rank, card in enumerate(cards):
            folder = tmp_path / str(rank)
            folder.mkdir()
            own = {**PLAIN, "RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": card, **shared}
            script = [SCRIPTS / "tiny_train.py", "--num-gpus", "2", "--batch-size", "5", "--out", folder / "log.json"]
            ranks.append(start(script, folder, own))
        runs = [finish(rank) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.kill(rank.pid, signal.SIGKILL)
                rank.wait()
    assert [run.code for run in runs] == [0, 0], [run.err for run in runs]
    script = [SCRIPTS / "tiny_train.py", "--num-gpus", "1", "--batch-size", "5", "--out", tmp_path / "log.json"]
    assert run_python(script, tmp_path, {**PLAIN, **visible(1)}).code == 0
    norms = [
        [h["grad_norm"] for h in json.loads((folder / "log.json").read_text())["log"] if "grad_norm" in h]
        for folder in (tmp_path, tmp_path / "0")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
