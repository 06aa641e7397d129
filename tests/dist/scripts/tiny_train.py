"""A user's script: a tiny Llama, ragged rows, plain Trainer. Options choose sizes."""

import argparse
import json
import os
from pathlib import Path

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int, default=2)
parser.add_argument("--rows", type=int, default=24)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--out", required=True)
args = parser.parse_args()

ump.enable_multi_gpu(num_gpus=args.num_gpus or None)

import torch
from common import arguments
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer

torch.manual_seed(0)
trainer = Trainer(
    model=tiny_llama(),
    args=arguments("checkpoints", args.batch_size, num_train_epochs=1, learning_rate=1e-3),
    train_dataset=RaggedRows(args.rows),
    data_collator=collate,
)
trainer.train()
if os.environ.get("RANK", "0") == "0":
    Path(args.out).write_text(json.dumps({"log": trainer.state.log_history}))
