"""One rank under our supervisor, as on a machine with several cards: its group and its allocator.

Usage: supervised.py OUT.json
"""

import json
import os
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

device = os.environ.get("GPU_KIT_DEVICE", "cuda")
# Restarts need a supervisor, even for one rank.
ump.enable_multi_gpu(num_gpus=1, device=device, max_restarts=1)

import torch
import torch.distributed as dist

is_cuda = device == "cuda"
facts: dict = {"launcher": ump.get_multi_gpu_status().launcher}
if is_cuda:
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    facts["allocator"] = {name: os.environ[name] for name in variables if name in os.environ}
    memory = torch.empty(64 << 20, device=device)
    facts["is_expandable"] = any(s["is_expandable"] for s in torch.cuda.memory_snapshot())

# A group of one, with the backend that several cards have.
dist.init_process_group("nccl" if is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
begin_s = time.perf_counter()
values = torch.ones(8, device=device)
dist.all_reduce(values)
facts["backend"] = dist.get_backend()
facts["sum"] = float(values.sum())
facts["first_all_reduce_s"] = round(time.perf_counter() - begin_s, 2)
dist.destroy_process_group()
Path(sys.argv[1]).write_text(json.dumps(facts))
