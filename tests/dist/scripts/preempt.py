"""A user's script that is told to stop: a tiny Llama that trains and evaluates. It touches a file at each place."""

import argparse
import atexit
import os
import signal
import time
from pathlib import Path

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="off")
parser.add_argument("--max-restarts", type=int, default=0)
parser.add_argument("--save", default="no")
parser.add_argument("--evaluate", action="store_true", help="after the second step, over many batches")
parser.add_argument("--catch", action="store_true")
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()

ump.enable_multi_gpu(resume=args.resume, grace_s=60.0, max_restarts=args.max_restarts, strategy=args.strategy)

import torch
from common import arguments
from tiny_llama import tiny_llama
from transformers import Trainer, TrainerCallback

rank = os.environ["RANK"]


class Places(TrainerCallback):
    """Says where the training is. Ranks that are far apart must agree as well: rank 1 is slow."""

    def on_step_end(self, training_args, state, control, **kwargs):
        Path(f"step_{rank}").write_text(str(state.global_step))
        if rank == "1":
            time.sleep(0.02)
        if state.global_step == 1 and "UNSLOTH_MULTIGPU_RUN_DIR" in os.environ:
            # As srun sends it to every process; what it means is the supervisor's to say.
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_prediction_step(self, training_args, state, control, **kwargs):
        Path("evaluating").touch()

    def on_evaluate(self, training_args, state, control, **kwargs):
        Path("evaluated").touch()


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_rows):
        self.rows = torch.randint(1, 64, (num_rows, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def goodbye():
    """What a tracker does at the end of rank 0: the end of other ranks must not cut it off."""
    time.sleep(0.5)
    Path("goodbye").touch()


if rank == "0":
    atexit.register(goodbye)

torch.manual_seed(0)
trainer = Trainer(
    model=tiny_llama(hidden_size=16, num_layers=1),
    args=arguments(
        "checkpoints",
        4,
        per_device_eval_batch_size=1,
        max_steps=100_000,
        eval_strategy="steps" if args.evaluate else "no",
        eval_steps=2,
        save_strategy=args.save,
        save_steps=100_000,
    ),
    train_dataset=Rows(64),
    eval_dataset=Rows(100_000 if args.evaluate else 8),
    callbacks=[Places()],
)
try:
    trainer.train()
except KeyboardInterrupt:
    Path(f"interrupted_{rank}").write_text(str(trainer.state.global_step))
    if not args.catch:
        raise
Path(f"after_training_{rank}").touch()
