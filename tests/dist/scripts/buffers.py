"""Trains models whose buffers change while they train, and writes buffers and evaluations of each rank.

Usage: buffers.py RANKS OUT JOB...; 1 rank is the Trainer by itself. "sync" in the name of OUT: with sync="allreduce".
"""

import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

num_ranks, out, jobs = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
if num_ranks > 1:
    ump.enable_multi_gpu(num_gpus=num_ranks, **({"sync": "allreduce"} if "sync" in out.name else {}))

import torch
from common import SGD, write_outcome
from transformers import Trainer, TrainingArguments

rank = int(os.environ.get("RANK", "0"))
DRAW = torch.Generator().manual_seed(5)
ROWS = [{"x": x, "labels": torch.tensor(i % 3)} for i, x in enumerate(torch.randn(60, 6, generator=DRAW) * 2 + 1)]


class Net(torch.nn.Module):
    def __init__(self, momentum=0.1, num_calls=1):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.norm = torch.nn.BatchNorm1d(8, momentum=momentum)
        self.outer = torch.nn.BatchNorm1d(3)
        self.num_calls = num_calls

    def forward(self, x, labels):
        hidden = self.first(x)
        for _ in range(self.num_calls):
            hidden = self.norm(hidden).tanh()
        logits = self.outer(self.last(hidden))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Counting(Net):
    """Buffers of its own: of its samples, of its passes, one that grows, and a constant."""

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


# Model, rows, batch size, accumulation. Micro-batches are whole but in the job "shared".
JOBS = {
    "whole": (Net, 60, 3, 4),
    "average": (lambda: Net(momentum=None), 60, 3, 4),
    "twice": (lambda: Net(num_calls=2), 60, 3, 4),
    "three": (Net, 54, 3, 6),
    "shared": (Net, 60, 4, 1),
    "counting": (Counting, 60, 3, 4),
}


def run(job):
    make, num_rows, batch, accumulation = JOBS[job]
    torch.manual_seed(1)
    model = make()
    args = TrainingArguments(
        str(out / f"checkpoints_{job}"),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=2,
        eval_strategy="epoch",
        use_cpu=True,
        remove_unused_columns=False,
        **SGD,
    )
    trainer = Trainer(model=model, args=args, train_dataset=ROWS[:num_rows], eval_dataset=ROWS[:16])
    trainer.train()
    facts = {name: [h[name] for h in trainer.state.log_history if name in h] for name in ("grad_norm", "eval_loss")}
    write_outcome(out, job, facts, trainer.model.state_dict().items())


out.mkdir(parents=True, exist_ok=True)
for job in jobs:
    run(job)
