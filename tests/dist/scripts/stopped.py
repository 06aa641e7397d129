"""A user's script that ends by early stopping.

Usage: stopped.py PLACE:STEP, where SIGTERM comes, or SIGKILL for "killed"; or none:0. The order of samples, dropout
and a collator that masks at random in evaluations too, show in the weights whether random numbers go on.
"""

import os
import signal
import sys
import time
from functools import partial

import unsloth_multigpu as ump

place, step = sys.argv[1].split(":")
ump.enable_multi_gpu(num_gpus=2, resume="auto", balance="off")

import torch
from common import RANK, Calls, OwnOrder, arguments
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import EarlyStoppingCallback

from unsloth_multigpu.wire.context import RunContext


def stop(places, _, state, *__, **___):
    if place not in places or state.global_step != int(step):
        return
    if place == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif RANK == 0:
        os.kill(RunContext.read(os.environ).supervisor_pid, signal.SIGTERM)
        time.sleep(1.0)  # The supervisor looks for signals ten times a second.


def masked(rows):
    batch = collate(rows)
    return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)}


stops = Calls(on_step_begin=partial(stop, ["step", "killed"]), on_prediction_step=partial(stop, ["evaluation"]))
torch.manual_seed(0)
trainer = OwnOrder(
    model=tiny_llama(attention_dropout=0.1),
    args=arguments(
        *("checkpoints", 4),
        per_device_eval_batch_size=2,
        max_steps=14,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        learning_rate=1e-3,
        metric_for_best_model="eval_loss",
        restore_callback_states_from_checkpoint=True,
    ),
    train_dataset=RaggedRows(20),
    eval_dataset=RaggedRows(12, seed=1),
    data_collator=masked,
    # The loss never falls by so much: the third evaluation ends the training.
    callbacks=[EarlyStoppingCallback(2, early_stopping_threshold=100.0), stops],
)
trainer.train()
trainer.save_state()
trainer.save_model("last")
