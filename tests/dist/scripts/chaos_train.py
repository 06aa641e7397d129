"""A user's script for `unsloth-multigpu chaos`: evaluates, saves, accumulates, drops out and masks at random."""

import argparse

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--every", type=int, default=2, help="steps between two checkpoints and two evaluations")
args = parser.parse_args()

ump.enable_multi_gpu()

import random  # noqa: E402

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_rows, seed):
        draw = random.Random(seed)
        self.rows = [[draw.randrange(1, 128) for _ in range(draw.randrange(5, 40))] for _ in range(num_rows)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"ids": self.rows[index]}


def collate(rows):
    length = max(len(row["ids"]) for row in rows)
    ids = torch.tensor([row["ids"] + [0] * (length - len(row["ids"])) for row in rows])
    # What is asked for is drawn anew each time.
    is_asked = (ids > 0) & (torch.rand(ids.shape) < 0.7)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(~is_asked, -100)}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
)
trainer = Trainer(
    model=model,
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
        remove_unused_columns=False,
    ),
    train_dataset=Rows(40, seed=0),
    eval_dataset=Rows(8, seed=1),
    data_collator=collate,
)
trainer.train()
