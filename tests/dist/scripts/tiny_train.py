"""A user's script: a tiny Llama, ragged rows, plain Trainer. Options choose sizes and plant a fault on one rank."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int, default=2)
parser.add_argument("--rows", type=int, default=24)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--divergent", action="store_true", help="rows that differ from rank to rank")
parser.add_argument("--fault", default="", help="kind@rank:step")
parser.add_argument("--save-in", default="", help="folder for a checkpoint after every step")
parser.add_argument("--out", default="")
args = parser.parse_args()

ump.enable_multi_gpu(num_gpus=args.num_gpus)

import random  # noqa: E402

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

rank = int(os.environ.get("RANK", "0"))


class Fault(TrainerCallback):
    def on_step_end(self, training_args, state, control, **kwargs):
        if not args.fault:
            return
        kind, _, place = args.fault.partition("@")
        fault_rank, _, step = place.partition(":")
        if int(fault_rank) != rank or int(step) != state.global_step:
            return
        Path("fault_time").write_text(str(time.time()))
        if kind == "raise":
            raise ValueError("planted in step " + step)
        if kind == "exit":
            sys.exit(0)
        if kind == "os_exit":
            os._exit(0)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "kill_supervisor":
            Path("ranks.json").write_text(json.dumps({"rank": rank, "pid": os.getpid()}))
            os.kill(os.getppid(), signal.SIGKILL)
        if kind == "sleep":
            Path("sleeping").touch()
            time.sleep(3600)


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_rows):
        draw = random.Random(rank if args.divergent else 0)
        self.rows = [[draw.randrange(1, 128) for _ in range(draw.randrange(5, 40))] for _ in range(num_rows)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"sample": index, "ids": self.rows[index]}


def collate(rows):
    length = max(len(r["ids"]) for r in rows)
    ids = torch.tensor([r["ids"] + [0] * (length - len(r["ids"])) for r in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        args.save_in or "checkpoints",
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        num_train_epochs=args.epochs,
        logging_steps=1,
        save_strategy="steps" if args.save_in else "no",
        save_steps=1,
        learning_rate=1e-3,
        report_to=[],
        remove_unused_columns=False,
    ),
    train_dataset=Rows(args.rows),
    data_collator=collate,
    callbacks=[Fault()],
)
trainer.train()
print("after training")
if args.out and rank == 0:
    Path(args.out).write_text(json.dumps({"log": trainer.state.log_history}))
