"""Rank 0 sends to rank 2 and receives from rank 1 until the test kills it; the others write how that ended for them.

RANK is set. Each waits for a file, `go_RANK`, and is ready when it has written `ready_RANK`.
"""

import json
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.strategies.message import receive, send

RANK, LIMIT_S = int(os.environ["RANK"]), 20.0
LONG = torch.empty(2**25)  # More than the connection takes while nobody reads.

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{Path('store').absolute()}", rank=RANK, world_size=3)
group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S))
if RANK == 0:
    threading.Thread(target=receive, args=[LONG.clone(), 1, group], daemon=True).start()
Path(f"ready_{RANK}").touch()
while not Path(f"go_{RANK}").exists():
    time.sleep(0.02)
try:
    if RANK == 2:
        receive(LONG, 0, group)
    else:
        send([LONG], 2 if RANK == 0 else 0, group)
except DistributedError as error:
    Path(f"facts_{RANK}.json").write_text(json.dumps({"error": type(error).__name__, "text": str(error)}))
