"""Trains models whose buffers change while they train, and writes buffers and gradient norms of each rank.

Usage: buffers.py RANKS OUT JOB...; 1 rank is the Trainer by itself.
"""

import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, out, jobs = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
if num_ranks > 1:
    ump.enable_multi_gpu(num_gpus=num_ranks)

import torch
from common import SGD, write_outcome
from transformers import Trainer, TrainingArguments

rank = int(os.environ.get("RANK", "0"))
DRAW = torch.Generator().manual_seed(5)
ROWS = [{"x": x, "labels": torch.tensor(i % 3)} for i, x in enumerate(torch.randn(60, 6, generator=DRAW) * 2 + 1)]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.norm = torch.nn.BatchNorm1d(8)
        self.outer = torch.nn.BatchNorm1d(3)

    def forward(self, x, labels):
        logits = self.outer(self.last(self.norm(self.first(x)).tanh()))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Counting(Net):
    """Buffers of its own: of its samples, of its passes, one that each rank lets grow by itself, and a constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("constant", torch.arange(7, dtype=torch.float16))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x, labels):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
            self.passes += 1
            if len(self.seen) < 8 + 2 * rank:
                self.seen = torch.cat([self.seen, labels.detach()[:2]])
        self.cache = torch.full((2,), float(rank))
        return super().forward(x, labels)


JOBS = {"whole": Net, "counting": Counting}


def run(job):
    torch.manual_seed(1)
    model = JOBS[job]()
    args = TrainingArguments(
        str(out / f"checkpoints_{job}"),
        per_device_train_batch_size=3,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        eval_strategy="epoch",
        use_cpu=True,
        remove_unused_columns=False,
        **SGD,
    )
    trainer = Trainer(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:16])
    trainer.train()
    facts = {"grad_norm": [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]}
    write_outcome(out, job, facts, trainer.model.state_dict().items())


out.mkdir(parents=True, exist_ok=True)
for job in jobs:
    run(job)
