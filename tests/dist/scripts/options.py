"""Trains once for each variable, and writes how many steps that took. Usage: options.py NAME=VALUE ..."""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

from common import Line, arguments, points
from transformers import Trainer


def num_steps():
    trainer = Trainer(Line(), arguments("out", 4, num_train_epochs=1), train_dataset=points(24))
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
