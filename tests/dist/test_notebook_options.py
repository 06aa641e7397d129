"""Options of the line in a real kernel, as in a script: planner, resume, on_nan, comparison of replicas, strategies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.notebook import NotebookRun
from tests.helpers.run import LIGHT, ROOT, run_well, wait_until

pytestmark = pytest.mark.slow

ENABLE = """
import unsloth_multigpu as ump
ump.enable_multi_gpu(num_gpus=2, balance="tokens", resume="auto", on_nan="skip", verify_every=2,
    strategy="allreduce", loss_reduction="token_sum")
"""
TRAINING = f"""
import json, os, sys
sys.path[:0] = [{str(ROOT / "tests" / "dist" / "scripts")!r}, {str(ROOT)!r}]
import torch
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments
from unsloth_multigpu.group.replicas import tensor_hashes
from unsloth_multigpu.deal import balance

# Measured costs and speeds would deal the samples differently each time.
balance.Balancer._measures = lambda self: False
rank = int(os.environ["RANK"])

class Rows(RaggedRows):
    lengths = property(lambda self: list(map(len, self.rows)))

class Planted(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.fault == "stop" and state.global_step == 4:
            control.should_save = control.should_training_stop = True
        if self.fault == "flip" and rank == 1 and state.global_step == 3:
            model.lm_head.weight.data.view(torch.int32)[5] ^= 1

class Watched(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        self.seen.append([self.state.global_step, *inputs["input_ids"].shape])
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * float("nan") if self.fault == "nan" and rank == 1 and self.state.global_step == 2 else loss

def train(folder, fault=""):
    torch.manual_seed(0)
    model, planted = tiny_llama(), Planted()
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, save_steps=2,
        learning_rate=5e-3, optim="adamw_torch", logging_steps=1, report_to=[], disable_tqdm=True)
    trainer = Watched(model=model, args=arguments, train_dataset=Rows(40), data_collator=collate, callbacks=[planted])
    trainer.seen, trainer.fault, planted.fault = [], fault, fault
    trainer.train()
    norms = [h["grad_norm"] for h in trainer.state.log_history if "grad_norm" in h]
    facts = [trainer.seen, norms, hash(tuple(tensor_hashes([*model.parameters()]))), model.lm_head.weight.tolist()]
    values = [None, None]
    torch.distributed.all_gather_object(values, facts)
    if rank == 0:
        print(json.dumps(values), flush=True)
"""
NAMES = ("seen", "norms", "hash", "weights")


def _facts(line: str) -> list[dict[str, Any]]:
    """What each rank has noted."""
    return [dict(zip(NAMES, rank, strict=True)) for rank in json.loads(line)]


def _steps(rank: dict[str, Any]) -> set[int]:
    """Those that it has made but the first one."""
    return {step for step, _, _ in rank["seen"]} - {0}


def _trained(notebook: NotebookRun, folder: str, fault: str = "") -> list[dict[str, Any]]:
    cell = notebook.run(f"train({folder!r}, {fault!r})", timeout_s=60)
    assert not cell.error, cell.traceback
    return _facts(cell.text.strip().splitlines()[-1])


def _open(notebook: NotebookRun, line: str) -> None:
    for source in (line, TRAINING):
        cell = notebook.run(source, timeout_s=90)
        assert not cell.error, cell.traceback


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The same in a script: planned, and with a step left out."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(f'{ENABLE}{TRAINING}train("a")\ntrain("b", "nan")\n')
    run = run_well(["train.py"], folder, LIGHT)
    return [_facts(line) for line in run.out.splitlines() if line.startswith("[[")]


def test_planner_skipped_steps_replicas_and_resume_in_a_kernel(tmp_path: Path, script) -> None:
    planned_script, skipped_script = script
    with NotebookRun(tmp_path, LIGHT) as notebook:
        _open(notebook, ENABLE)
        # First, because a training resumes from one that was as many train() calls behind the line.
        stopped = _trained(notebook, "resumed", "stop")
        assert len(stopped[0]["norms"]) == 4
        planned, skipped = _trained(notebook, "planned"), _trained(notebook, "skipped", "nan")
        assert [planned, skipped] == [planned_script, skipped_script]
        for ranks in (planned, skipped):
            assert ranks[0]["hash"] == ranks[1]["hash"]
            assert [len(rank["norms"]) for rank in ranks] == [6, 6]
        assert planned[0]["hash"] != skipped[0]["hash"]
        rows = [[sum(n for step, n, _ in rank["seen"] if step == number) for rank in planned] for number in range(1, 6)]
        assert [sum(ranks) for ranks in rows] == [8] * 5
        parts = [[sum(step == number for step, _, _ in rank["seen"]) for rank in planned] for number in range(1, 6)]
        assert parts != [[1, 1]] * 5, "cut by their lengths, and not dealt in order as four rows each"

        cell = notebook.run("train('flipped', 'flip')")
        assert cell.error == "DivergenceError"
        assert "rank 1 differs from rank 0 in 1 of 21 trainable tensors: lm_head.weight" in cell.value

        notebook.restart()
        _open(notebook, ENABLE)
        resumed = _trained(notebook, "resumed")
        assert _steps(resumed[0]) == {4, 5}
        assert [rank["hash"] for rank in resumed] == [rank["hash"] for rank in planned]
        check_that_no_worker_outlives_the_kernel(notebook)


def check_that_no_worker_outlives_the_kernel(notebook: NotebookRun) -> None:
    """Not even one that is stopped, while a child of the kernel holds all of its open files."""
    (worker,) = notebook.children()
    source = "import time\nif rank == 0:\n    child = os.fork() or time.sleep(600)\n    print(child)"
    child = int(notebook.run(source).text)
    worker.send_signal(signal.SIGSTOP)
    os.kill(notebook.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_running(), 30, "the worker's end after its kernel's")
    os.kill(child, signal.SIGKILL)
