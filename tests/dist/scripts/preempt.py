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
from common import RANK, Calls, arguments
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer


def after_step(args, state, *_, **__):
    """Says where the training is. Ranks that are far apart must agree as well: rank 1 is slow."""
    Path(f"step_{RANK}").write_text(str(state.global_step))
    if RANK == 1:
        time.sleep(0.02)
    if state.global_step == 1 and "UNSLOTH_MULTIGPU_RUN_DIR" in os.environ:
        # As srun sends it to every process; what it means is the supervisor's to say.
        os.kill(os.getpid(), signal.SIGUSR1)


def goodbye():
    """What a tracker does at the end of rank 0: the end of other ranks must not cut it off."""
    time.sleep(0.5)
    Path("goodbye").touch()


if RANK == 0:
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
    train_dataset=RaggedRows(64),
    eval_dataset=list(RaggedRows(8)) * (12_500 if args.evaluate else 1),
    data_collator=collate,
    callbacks=[
        Calls(
            on_step_end=after_step,
            on_prediction_step=lambda *_, **__: Path("evaluating").touch(),
            on_evaluate=lambda *_, **__: Path("evaluated").touch(),
        )
    ],
)
try:
    trainer.train()
except KeyboardInterrupt:
    Path(f"interrupted_{RANK}").write_text(str(trainer.state.global_step))
    if not args.catch:
        raise
Path(f"after_training_{RANK}").touch()
