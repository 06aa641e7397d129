"""A user's script without the line: a tiny Llama, ragged rows, uneven steps. The argument plants a fault.

Usage: verify_me.py [--dropout P] [--lr RATE] [--rows N] [--model FOLDER] [--fault KIND], with FOLDER: a configuration
without weights; KIND: scaled, counter, one_rank, no_training, stream, reads, killed, or lora, which is none.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
from tiny_llama import collate, tiny_llama
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--rows", type=int, default=19)
parser.add_argument("--model", default="")
parser.add_argument("--fault", default="")
args = parser.parse_args()
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def row(seed):
    ids = torch.randint(1, 64, (3 + 5 * seed % 17,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids.tolist()}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(row, range(args.rows))


class Fault(TrainerCallback):
    def on_step_end(self, training_args, state, control, model=None, **kwargs):
        if args.fault == "one_rank" and rank == 1:
            with torch.no_grad():
                next(model.parameters()).add_(1e-3)


class Scaled(Trainer):
    """Scales its gradient, but not its loss, where there are several ranks: the fault that a loss curve hides. Or by
    how often it was called: ranks call it less often than one process."""

    num_calls = 0

    def compute_loss(self, model, inputs, *positional, **named):
        loss = super().compute_loss(model, inputs, *positional, **named)
        if args.fault == "scaled" and world_size > 1 and self.state.global_step == 1:
            return loss.detach() + 1.01 * (loss - loss.detach())
        self.num_calls += 1
        return loss * (1 + self.num_calls / 10) if args.fault == "counter" else loss


if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to("cpu")
else:
    model = tiny_llama(hidden_size=16, attention_dropout=args.dropout)
if args.fault == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if args.fault == "reads":
    print(float(model.lm_head.weight.sum()))
if args.fault == "lora":
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer = Scaled(
    model=model,
    train_dataset=Stream() if args.fault == "stream" else list(Stream()),
    data_collator=collate,
    callbacks=[Fault()],
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=3,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        max_steps=50 if args.fault == "stream" else -1,
        save_strategy="steps",
        save_steps=1,
        learning_rate=args.lr,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
)
if args.fault == "no_training":
    sys.exit()
try:
    trainer.train()
finally:
    Path(f"went_on_{world_size}_{rank}").touch()
trainer.save_model("saved")
