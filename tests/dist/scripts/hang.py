"""A tiny training that hangs in another way at each start of the ranks: `kinds` are given by name, in order."""

import os
import signal
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(
    num_gpus=2,
    max_restarts=len(sys.argv) - 3,
    hang_timeout_s=float(sys.argv[1]),
    # Where it hangs is the exchange of gradients.
    check_first_step="off",
    loss_reduction="row_mean",
)

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

rank = int(os.environ["RANK"])
kind = sys.argv[2 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
STEP = 3


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, labels=None):
        if rank == 1 and kind == "late" and num_steps:  # Before what the ranks exchange.
            time.sleep(0.3 if num_steps < STEP else 3600)
        return {"loss": ((x * self.weight).sum(-1) - labels).square().mean()}


num_steps = 0


def collate(rows):
    if rank == 1 and num_steps > 3 and kind == "spin":
        note()
        while True:
            pass
    return {"x": torch.stack([r["x"] for r in rows]), "labels": torch.ones(len(rows))}


def note(what="since"):
    Path(f"{kind}_{what}").write_text(str(time.monotonic()))


class Fault(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0 and rank == 1:
            note("begin")

    def on_optimizer_step(self, args, state, control, **kwargs):
        if rank == 1 and state.global_step == STEP - 1 and kind == "stop":
            note()
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)  # It is let go on for its stack, and would end well before it is killed.

    def on_log(self, args, state, control, logs=None, **kwargs):
        if rank == 0 and kind == "late" and "multigpu/waiting" in logs:
            print("waiting", logs["multigpu/waiting"], "slowest", logs["multigpu/slowest_rank"], flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        global num_steps
        num_steps = state.global_step
        if rank == 1 and state.global_step == STEP - 1 and kind == "spin":  # No hang: it makes a sample, say.
            time.sleep(1.5 * float(sys.argv[1]))


Trainer(
    model=Model(),
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        max_steps=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
    ),
    train_dataset=[{"x": torch.full((4,), float(i))} for i in range(32)],
    data_collator=collate,
    callbacks=[Fault()],
).train()
print("ended", kind)
