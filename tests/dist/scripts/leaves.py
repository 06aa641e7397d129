"""A rank of a launcher that serves no store. Usage: leaves.py WAY, in a folder for both ranks.

"late": rank 1 saves when rank 0 has come to its end. "killed": rank 1 dies behind its line. "failed": rank 0 fails
while rank 1 waits for it.
"""

import os
import signal
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import torch.distributed as dist
from transformers import LlamaConfig

import unsloth_multigpu.session

# Not so long that a test waits, but a slow rank 1 is no rank 1 that stays.
unsloth_multigpu.session._SERVE_AFTER_FAILURE_S = 30.0
rank, way = int(os.environ["RANK"]), sys.argv[1]


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


if way == "late":
    if rank == 0:
        LlamaConfig().save_pretrained("saved")
        Path("pid.part").write_text(str(os.getpid()))
        Path("pid.part").rename("pid")
    else:
        while not Path("pid").exists():
            time.sleep(0.02)
        end_s = time.monotonic() + 2.0
        while is_there(Path("pid").read_text()) and time.monotonic() < end_s:
            time.sleep(0.02)
        LlamaConfig().save_pretrained("saved")
        print("saved on rank 1")
elif way == "killed":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
elif way == "failed":
    dist.init_process_group("gloo")
    if rank == 0:
        raise ValueError("of rank 0")
    dist.barrier()
