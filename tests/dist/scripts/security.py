"""Trains with evaluation and checkpoints under a umask that takes nothing away, and writes what others could reach.

Usage: security.py FOLDER
"""

import json
import os
import socket
import stat
import sys
from pathlib import Path

import unsloth_multigpu as ump

folder = Path(sys.argv[1])
os.umask(0)


def audit(event, arguments):
    if event == "pickle.find_class" and is_watching:
        with (folder / f"unpickled_{os.environ.get('RANK', 'supervisor')}").open("a") as file:
            file.write(f"{arguments}\n")


# Importing libraries is none of it.
is_watching = "RANK" not in os.environ
sys.addaudithook(audit)
ump.enable_multi_gpu(num_gpus=2)

import psutil
import torch
import torch.distributed.distributed_c10d as c10d
from common import RANK, Line, arguments, points, write_facts
from transformers import Trainer

pickled = []


def watched(name):
    original = getattr(c10d, name)

    def call(*args, **kwargs):
        pickled.append(name)
        return original(*args, **kwargs)

    return call


# What all collectives of objects use.
for name in ("_object_to_tensor", "_tensor_to_object"):
    setattr(c10d, name, watched(name))


def train():
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    Trainer(
        model=Line(),
        args=arguments(folder / "out", 4, num_train_epochs=1, **steps),
        train_dataset=points(8),
        eval_dataset=points(8),
        compute_metrics=lambda prediction: {"n": len(prediction.label_ids)},
    ).train()


def modes(place):
    paths = [Path(place), *Path(place).rglob("*")]
    return {str(p.relative_to(place)): stat.S_IMODE(p.lstat().st_mode) for p in paths}


def listeners():
    supervisor = psutil.Process().parent()
    found = []
    for process in (supervisor, *supervisor.children(recursive=True)):
        for connection in process.net_connections():
            if connection.status == "LISTEN" or (connection.type == socket.SOCK_DGRAM and not connection.raddr):
                found.append([process.pid == supervisor.pid, connection.laddr.ip])
    return found


train()
write_facts(folder / "pickled", pickled)
torch.distributed.barrier()
if RANK == 0:
    facts = {
        "run_dir": modes(os.environ["UNSLOTH_MULTIGPU_RUN_DIR"]),
        "log_dir": modes(ump.get_multi_gpu_status().log_dir),
        "out": modes(folder / "out"),
        "listeners": listeners(),
    }
    (folder / "facts.json").write_text(json.dumps(facts))
torch.distributed.barrier()
