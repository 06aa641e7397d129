"""A user's script for `unsloth-multigpu chaos`: evaluates, saves, accumulates, drops out and masks at random."""

import argparse
import sys
from pathlib import Path

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--every", type=int, default=2, help="steps between two checkpoints and two evaluations")
parser.add_argument("--shard-on-cpu", action="store_true", help="lets accelerate's FSDP2 shard CPU ranks")
args = parser.parse_args()

ump.enable_multi_gpu()

import torch
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer, TrainingArguments

if args.shard_on_cpu:
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from tests.helpers.cpu_fsdp import allow_cpu_ranks

    allow_cpu_ranks()


def collate_masked(rows):
    batch = collate(rows)
    # What is asked for is drawn again each time.
    is_asked = torch.rand(batch["labels"].shape) < 0.7
    return {**batch, "labels": batch["labels"].masked_fill(~is_asked, -100)}


torch.manual_seed(0)
trainer = Trainer(
    model=tiny_llama(attention_dropout=0.1),
    args=TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=args.steps,
        eval_strategy="steps",
        eval_steps=args.every,
        save_steps=args.every,
        save_total_limit=3,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
    ),
    train_dataset=RaggedRows(40),
    eval_dataset=RaggedRows(8, seed=1),
    data_collator=collate_masked,
)
trainer.train()
