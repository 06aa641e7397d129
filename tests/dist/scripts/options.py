"""Trains once for each variable, and writes how many steps that took. Usage: options.py NAME=VALUE ..."""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}


def num_steps():
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    rows = [{"x": torch.full((4,), float(i)), "labels": 0} for i in range(24)]
    trainer = Trainer(model=Model(), args=arguments, train_dataset=rows)
    trainer.train()
    return trainer.state.global_step


found = {}
for argument in sys.argv[1:]:
    name, _, value = argument.partition("=")
    # The variables of the next training, as if the ranks had been started with them.
    ump.disable_multi_gpu()
    os.environ[name] = value
    ump.enable_multi_gpu(num_gpus=2)
    found[argument] = num_steps()
    del os.environ[name]
if os.environ["RANK"] == "0":
    Path("steps.json").write_text(json.dumps(found))
