"""Trains a tiny model, and fails in another way in each attempt. Usage: fails.py SMALL_DISK"""

import os
import random
import sys

import exit_codes  # noqa: F401

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2, max_restarts=9)

import torch
from common import RANK, Calls, Line, arguments
from transformers import Trainer

from unsloth_multigpu.errors import DivergenceError

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def fault(args, state, *_, **__):
    if RANK == 1 and state.global_step == 2 and attempt == 0:
        raise ValueError("planted in step 2")


def train(folder, *, noise=0, batch_size=4, dtype=torch.float32):
    draw = random.Random(0)
    rows = [{"x": torch.full((64,), draw.random()), "labels": torch.zeros(1)} for _ in range(24)]
    rows[5]["labels"] += noise
    args = arguments(
        folder,
        batch_size,
        num_train_epochs=1,
        save_strategy="steps" if attempt == 1 else "no",
        save_steps=1,
        eval_strategy="epoch" if attempt > 1 else "no",
    )
    data = {"train_dataset": rows, "eval_dataset": rows[4:9]}
    model = Line(64, 512).to(dtype)  # Twice the small disk.
    Trainer(model=model, args=args, callbacks=[Calls(on_step_end=fault)], **data).train()


if attempt == 0:
    train("out")
elif attempt == 1:
    train(sys.argv[1])
else:
    try:
        train("out", noise=RANK, dtype=(torch.float32, torch.bfloat16)[RANK])
    except DivergenceError as error:
        sys.stderr.write(f"{error}\n[exit code {error.exit_code}]\n")
    train("out", batch_size=1)
print("after training")
