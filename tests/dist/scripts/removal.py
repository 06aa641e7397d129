"""Removes files and saves as scripts do, on ranks that come at different times. Usage: removal.py CASE"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

from transformers import BertConfig

rank = int(os.environ["RANK"])
model = BertConfig(hidden_size=8)
facts = {}


def meet(name):
    Path(f"flag_{name}_{rank}").touch()
    limit = time.monotonic() + 60
    while not os.path.exists(f"flag_{name}_{1 - rank}"):
        assert time.monotonic() < limit, name
        time.sleep(0.001)


def works():
    """`if exists: rmtree` before each save, with one rank or the other late."""
    kept = []
    for i in range(8):
        meet(i)
        if i % 2 == rank:
            time.sleep(0.2)
        if os.path.exists("final"):
            shutil.rmtree("final")
        model.save_pretrained("final")
        meet(f"{i} saved")
        kept.append(sorted(os.listdir("final")))
    facts["kept"] = kept


def too_late():
    """A rank that is later than rank 0 waits removes what rank 0 has saved since."""
    if rank == 1:
        meet("saved")
    shutil.rmtree("final", ignore_errors=True)
    model.save_pretrained("final")
    meet("saved")


{"works": works, "too late": too_late}[sys.argv[1]]()
Path(f"facts_{rank}.json").write_text(json.dumps(facts))
