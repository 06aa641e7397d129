"""Says who it is after the line, and adds up the ranks over the process group. Usage: whoami.py OUT [arguments]"""

import json
import os
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu()
# Torch reads them when the rank's device is chosen, which the line does.
allocator = {n: v for n, v in os.environ.items() if n.startswith("PYTORCH_") and n.endswith("ALLOC_CONF")}

import torch
import torch.distributed as dist

status = ump.get_multi_gpu_status()
total = torch.tensor([float(status.rank + 1)])
if status.world_size > 1:
    dist.init_process_group("gloo")
    dist.all_reduce(total)
facts = {
    "rank": status.rank,
    "launcher": status.launcher,
    "total": float(total),
    "arguments": sys.argv[2:],
    "name": __name__,
    "flags": ["faulthandler" in sys._xoptions, sys.flags.bytes_warning],
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "allocator": allocator,
}
(Path(sys.argv[1]) / f"rank_{status.rank}.json").write_text(json.dumps(facts))
