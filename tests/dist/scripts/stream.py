"""Trains on streams whose passes do not divide by the accumulation, and writes what each step was.

Usage: stream.py RANKS OUT JOB...; 1 rank is the Trainer by itself. Jobs are the names of JOBS.
"""

import json
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, out, jobs = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
if num_ranks > 1:
    ump.enable_multi_gpu(num_gpus=num_ranks)

import torch
from common import RANK, SGD, MeanLoss, Record, arguments, logged, write_outcome
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer


class Stream(torch.utils.data.IterableDataset):
    """Another order in each pass."""

    def __init__(self, num_rows):
        self.rows, self.epoch = list(RaggedRows(num_rows)), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        first = 3 * self.epoch % len(self.rows)
        return iter(self.rows[first:] + self.rows[:first])


class Sized(Stream):
    def __len__(self):
        return len(self.rows)


class Handle(torch.utils.data.IterableDataset):
    """Rows of one file, which each pass goes on to read."""

    def __init__(self, num_rows):
        self.rows, self.file = list(RaggedRows(num_rows)), None

    def __iter__(self):
        if self.file is None:
            path = out / f"rows_{RANK}.txt"
            path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            self.file = path.open()
        while line := self.file.readline():
            yield json.loads(line)


# Trainer, data, batch size, accumulation, further arguments. Passes of 9, 9, 5 and 9 micro-batches.
JOBS = {
    "tokens": (Trainer, Stream(26), 3, 2, {"max_steps": 11}),
    "means": (MeanLoss, Stream(26), 3, 2, {"max_steps": 11}),
    "most": (Trainer, Stream(10), 2, 4, {"max_steps": 4}),
    "sized": (Trainer, Sized(26), 3, 2, {"num_train_epochs": 2}),
    "resumed": (Trainer, Stream(26), 3, 2, {"max_steps": 11}),
    "handle": (Trainer, Handle(200), 4, 1, {"max_steps": 10}),
    "handle_means": (MeanLoss, Handle(200), 4, 1, {"max_steps": 10}),
}


def run(job):
    trainer_class, rows, batch, accumulation, given = JOBS[job]
    folder = out / f"checkpoints_{job}"
    numbers = {tuple(row["input_ids"]): i for i, row in enumerate(rows.rows)}
    saves = {"save_strategy": "steps", "save_steps": 1} if job == "resumed" else {}

    def trained(**more):
        torch.manual_seed(1)
        args = arguments(folder, batch, accumulation, use_cpu=True, **{**SGD, **saves, **given})
        trainer = trainer_class(model=tiny_llama(), args=args, train_dataset=rows, data_collator=collate)
        record = Record(
            trainer, lambda inputs: [numbers[tuple(i for i in row if i)] for row in inputs["input_ids"].tolist()]
        )
        trainer.train(**more)
        return trainer, record

    trainer, record = trained()
    facts = logged(trainer, "grad_norm", "loss")
    facts["samples"] = list(record.steps.values())
    facts["train_loss"] = trainer.state.log_history[-1]["train_loss"]
    if job == "resumed":
        facts["resumed"] = {}
        # After the last step of the first pass; after the first of the second, which has had what was left over.
        for step in (4, 5):
            again, _ = trained(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
            facts["resumed"][step] = logged(again, "grad_norm")["grad_norm"]
    write_outcome(out, job, facts, trainer.model.named_parameters())


out.mkdir(parents=True, exist_ok=True)
for job in jobs:
    run(job)
