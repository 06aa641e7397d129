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

from unsloth_multigpu import plugin

rank = int(os.environ["RANK"])
model = BertConfig(hidden_size=8)
facts = {}


def meet(name):
    Path(f"flag_{name}_{rank}").touch()
    limit = time.monotonic() + 60
    while not os.path.exists(f"flag_{name}_{1 - rank}"):
        assert time.monotonic() < limit, name
        time.sleep(0.001)


def num_keys():
    """Of the store that the ranks share, when both have come here."""
    meet(f"before {len(facts)}")
    found = plugin.active_session().manager().store.num_keys()
    meet(f"after {len(facts)}")
    return found


def works():
    """`if exists: rmtree` before each save, with one rank or the other late."""
    kept = []
    for i in range(20):
        meet(i)
        if i % 2 == rank:
            time.sleep(0.2)
        if os.path.exists("final"):
            shutil.rmtree("final")
        model.save_pretrained("final")
        meet(f"{i} saved")
        kept.append(sorted(os.listdir("final")))
    facts["kept"] = kept
    facts["keys of saves"] = num_keys()

    for i in range(300):
        Path(f"draft_{rank}").touch()
        os.replace(f"draft_{rank}", f"placed_{rank}_{i}")
    facts["keys after replace"] = num_keys()

    # A path that is gone has one answer on all ranks, also where one of them has removed it before.
    facts["missing"] = []
    for i in range(3):
        Path("gone").mkdir(exist_ok=True)
        meet(f"there {i}")
        if rank == i % 2:
            shutil.rmtree("gone")
        meet(f"missing {i}")
        try:
            shutil.rmtree("gone")
        except FileNotFoundError:
            facts["missing"].append("FileNotFoundError")
        meet(f"missed {i}")


def too_late():
    """A rank that is later than rank 0 waits removes what rank 0 has saved since."""
    if rank == 1:
        meet("saved")
    shutil.rmtree("final", ignore_errors=True)
    model.save_pretrained("final")
    meet("saved")


{"works": works, "too late": too_late}[sys.argv[1]]()
Path(f"facts_{rank}.json").write_text(json.dumps(facts))
