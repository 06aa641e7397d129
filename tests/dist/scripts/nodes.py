"""A user's script on several nodes: trains as often as asked, and says by files in the folder $HERE where it is.

Usage: nodes.py --folder $HERE NAME... : one training for each name. Before each it waits for the file go_NAME.
"cut" never ends; "again" keeps a checkpoint of every step, and the last rank fails in step 4.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch
from common import RANK, Calls, arguments
from safetensors.torch import save_file
from tiny_llama import RaggedRows, collate, tiny_llama
from transformers import Trainer

world_size = int(os.environ.get("WORLD_SIZE", "1"))
is_first_round = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
here = Path(os.environ["HERE"])


def after_step(name, _, state, *__, **___):
    """Writes down each step, with its number of ranks."""
    with (here / f"steps_{name}_{RANK}").open("a") as file:
        file.write(json.dumps([state.global_step, world_size]) + "\n")
    if name == "again" and state.global_step == 4 and 0 < RANK == world_size - 1 and is_first_round:
        raise ValueError("planted")


def train(name):
    torch.manual_seed(0)
    model = tiny_llama()
    trainer = Trainer(
        model=model,
        args=arguments(
            here / "checkpoints",
            4,
            max_steps={"cut": 100_000, "again": 12}[name],
            save_strategy="steps" if name == "again" else "no",
            save_steps=1,
            save_total_limit=2,
            learning_rate=1e-3,
        ),
        train_dataset=RaggedRows(24),
        data_collator=collate,
        callbacks=[Calls(on_step_end=partial(after_step, name))],
    )
    trainer.train()
    if RANK == 0:
        save_file({n: p.detach().clone() for n, p in model.named_parameters()}, here / f"weights_{name}")


restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
print("ranks", world_size, "round", restarts, "seed", os.environ.get("PYTHONHASHSEED"))
print("interfaces", os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"), flush=True)
for name in sys.argv[3:]:
    while not (here / f"go_{name}").exists():
        time.sleep(0.02)
    train(name)
