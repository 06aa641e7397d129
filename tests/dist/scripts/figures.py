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
from common import RANK, Calls, Line, arguments, points, write_facts
from tiny_llama import RaggedRows, collate, collate_end_to_end, tiny_llama
from transformers import Trainer

from unsloth_multigpu.wire.heartbeat import read_beats


def train(job):
    torch.manual_seed(0)
    pages = None

    def hold_up(*_, **__):
        time.sleep(job.get("slow", 0.0) if RANK == 1 else 0)

    def look_at_pages(*_, **__):
        nonlocal pages
        folder = os.environ.get("UNSLOTH_MULTIGPU_RUN_DIR")
        if folder and RANK == 0:
            pages = {rank: dataclasses.asdict(beat) for rank, beat in read_beats(folder).items()}

    data = {"train_dataset": RaggedRows(job.get("rows", 24)), "data_collator": collate}
    if job.get("kind") == "images":
        data = {"train_dataset": points(24)}  # Without tokens.
    elif job.get("kind") == "end to end":
        data["data_collator"] = collate_end_to_end
    trainer = Trainer(
        model=Line() if job.get("kind") == "images" else tiny_llama(),
        args=arguments(out / job["name"], 4, 2, **{"num_train_epochs": 1, **job.get("arguments", {})}),
        **data,
        callbacks=[Calls(on_step_begin=hold_up, on_train_end=look_at_pages)],
    )
    begin = time.monotonic()
    result = trainer.train(**job.get("train", {}))
    report = ump.get_multi_gpu_status().report
    return {
        "seconds": time.monotonic() - begin,
        "runtime": result.metrics["train_runtime"],
        "log": trainer.state.log_history,
        "pages": pages,
        "report": None if report is None else dataclasses.asdict(report),
        "summary": None if report is None else report.summary(),
        "numbers": None if report is None else [report.rates[name] for name in ("tokens_per_s", "waiting", "padding")],
    }


facts = {job["name"]: train(job) for job in json.loads(sys.argv[4])}
out.mkdir(parents=True, exist_ok=True)
write_facts(out / "facts", facts)
