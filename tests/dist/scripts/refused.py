"""Trainings that are refused, by a script that catches it. Usage: refused.py WAY, with WAY one of alone, again"""

import sys

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import torch
from common import arguments
from transformers import Trainer

way = sys.argv[1]


class Model(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.factor = factor

    def forward(self, x, labels=None):
        loss = ((x @ self.weight - labels) ** 2).mean()
        return {"loss": loss * self.factor}


def train(batch, factor=1.0):
    rows = [{"x": torch.tensor([i / 4, 1.0]), "labels": torch.tensor(2.0)} for i in range(12)]
    trainer = Trainer(Model(factor), arguments("out", batch, max_steps=3), train_dataset=rows)
    try:
        trainer.train()
    except Exception as error:
        print("caught", type(error).__name__, flush=True)
    print("steps", trainer.state.global_step, flush=True)


train(1)
if way == "again":
    train(4)
    train(4, float("nan"))
print("end", flush=True)
