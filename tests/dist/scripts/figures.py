"""Trains, and writes each rank's figures: its report, its log, what stood on the pages after the last step.

Usage: figures.py RANKS OUT OPTIONS JOBS, the last two in JSON
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

out = Path(sys.argv[2])
# Of the steps as they are trained: a comparison takes time of its own, before a step of a script's collator.
ump.enable_multi_gpu(num_gpus=int(sys.argv[1]), check_first_step="off", **json.loads(sys.argv[3]))

import torch
from common import arguments
from tiny_llama import RaggedRows, collate, collate_end_to_end, tiny_llama
from transformers import Trainer, TrainerCallback

from unsloth_multigpu.wire.heartbeat import read_beats

RANK = int(os.environ.get("RANK", "0"))


class Images(torch.nn.Module):
    """A model without tokens."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, pixel_values, labels):
        logits = self.layer(pixel_values)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Slow(TrainerCallback):
    """Holds rank 1 up before each step, and looks at the pages at the end."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.pages = None

    def on_step_begin(self, *_, **__):
        if RANK == 1:
            time.sleep(self.seconds)

    def on_train_end(self, *_, **__):
        folder = os.environ.get("UNSLOTH_MULTIGPU_RUN_DIR")
        if folder and RANK == 0:
            self.pages = {rank: dataclasses.asdict(beat) for rank, beat in read_beats(folder).items()}


def train(job):
    torch.manual_seed(0)
    callback = Slow(job.get("slow", 0.0))
    data = {"train_dataset": RaggedRows(job.get("rows", 24)), "data_collator": collate}
    if job.get("kind") == "images":
        torch.manual_seed(0)
        data = {"train_dataset": [{"pixel_values": torch.randn(4), "labels": i % 2} for i in range(24)]}
    elif job.get("kind") == "end to end":
        data["data_collator"] = collate_end_to_end
    trainer = Trainer(
        model=Images() if job.get("kind") == "images" else tiny_llama(),
        args=arguments(out / job["name"], 4, 2, **{"num_train_epochs": 1, **job.get("arguments", {})}),
        **data,
        callbacks=[callback],
    )
    begin = time.monotonic()
    result = trainer.train(**job.get("train", {}))
    report = ump.get_multi_gpu_status().report
    return {
        "seconds": time.monotonic() - begin,
        "runtime": result.metrics["train_runtime"],
        "log": trainer.state.log_history,
        "pages": callback.pages,
        "report": None if report is None else dataclasses.asdict(report),
        "summary": None if report is None else report.summary(),
        "numbers": None if report is None else [report.rates[name] for name in ("tokens_per_s", "waiting", "padding")],
    }


facts = {job["name"]: train(job) for job in json.loads(sys.argv[4])}
out.mkdir(parents=True, exist_ok=True)
(out / f"facts_{RANK}.json").write_text(json.dumps(facts))
