"""Ranks that exchange a tensor in each step and say where they are, as a training does, without transformers.

Usage: dies.py FOLDER [KIND@RANK ...]; each attempt has the next fault, after its first step. Without one it ends well.
"""

import os
import signal
import sys
import time
from pathlib import Path

import exit_codes  # noqa: F401

import unsloth_multigpu as ump
from unsloth_multigpu import plugin

folder, faults = Path(sys.argv[1]), sys.argv[2:]
ump.enable_multi_gpu(num_gpus=2, max_restarts=len(faults))

import torch
import torch.distributed as dist

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
fault = faults[attempt] if attempt < len(faults) else ""


def fail(kind):
    if kind == "raise":
        raise ValueError("planted in step 2")
    if kind == "exit":
        sys.exit(0)
    if kind == "os_exit":
        os._exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "kill_supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
    if kind == "sleep":
        (folder / "sleeping").touch()
        time.sleep(3600)


dist.init_process_group("gloo")
session = plugin._session
# A signal asks ranks that train to save first. Those that sleep are to end at once.
if not fault.startswith("sleep"):
    session.events.write("training")
total = torch.zeros(1)
for step in range(1, 4):
    dist.all_reduce(total.add_(1))
    if fault.partition("@")[2] == str(rank) and step == 2:
        fail(fault.partition("@")[0])
    session.beat.mark(step=step)
session.events.write("trained")
print(f"done {attempt}")
