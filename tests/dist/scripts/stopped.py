"""A user's script that ends by early stopping.

Usage: stopped.py PLACE:STEP, where SIGTERM comes, or SIGKILL for "killed"; or none:0. The order of samples, dropout
and a collator that masks at random in evaluations too, show in the weights whether random numbers go on.
"""

import os
import signal
import sys
import time

import unsloth_multigpu as ump

place, step = sys.argv[1].split(":")
ump.enable_multi_gpu(num_gpus=2, resume="auto", balance="off")

import torch
from common import OwnOrder
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from unsloth_multigpu.wire.context import RunContext


class Stop(TrainerCallback):
    def signal(self, state, here):
        if (here, state.global_step) == (place, int(step)) and os.environ["RANK"] == "0":
            os.kill(RunContext.read(os.environ).supervisor_pid, signal.SIGTERM)
            time.sleep(1.0)  # The supervisor looks for signals ten times a second.

    def on_step_begin(self, args, state, control, **kwargs):
        self.signal(state, "step")
        if (place, state.global_step) == ("killed", int(step)):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_prediction_step(self, args, state, control, **kwargs):
        self.signal(state, "evaluation")


def masked(rows):
    batch = collate(rows)
    return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)}


torch.manual_seed(0)
trainer = OwnOrder(
    model=tiny_llama(attention_dropout=0.1),
    args=TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        max_steps=14,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        logging_steps=1,
        learning_rate=1e-3,
        metric_for_best_model="eval_loss",
        restore_callback_states_from_checkpoint=True,
        report_to=[],
    ),
    train_dataset=RaggedRows(20),
    eval_dataset=RaggedRows(12, seed=1),
    data_collator=masked,
    # The loss never falls by so much: the third evaluation ends the training.
    callbacks=[EarlyStoppingCallback(2, early_stopping_threshold=100.0), Stop()],
)
trainer.train()
trainer.save_state()
trainer.save_model("last")
