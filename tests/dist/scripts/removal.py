"""Removes, moves and saves as scripts do, with one rank ahead of the other. Usage: removal.py CASE [SECONDS]

Ranks are put in order by flag files: `after(name)` waits until the other rank has called `flag(name)`.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2, timeout_s=float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)

from transformers import BertConfig

rank = int(os.environ["RANK"])
model = BertConfig(hidden_size=8)
facts = {}


def flag(name):
    Path(f"flag_{name}_{rank}").touch()


def after(name):
    limit = time.monotonic() + 30
    while not os.path.exists(f"flag_{name}_{1 - rank}"):
        assert time.monotonic() < limit, name
        time.sleep(0.001)


def meet(name):
    flag(name)
    after(name)


def files(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else None


def replace_model(final, first, name):
    """The usual lines. `first` is the rank that is through with them before the other begins, None = in step."""
    if first is None:
        meet(name)
    elif rank != first:
        after(name)
    elif first == 1:
        flag(name)  # Its save waits for rank 0's.
    if os.path.exists(final):
        shutil.rmtree(final)
    model.save_pretrained(final)
    if rank == first == 0:
        flag(name)
    found = files(final)
    meet(f"{name} end")
    return found


def works():
    facts["rank 0 first"] = [replace_model("final", 0, f"a{i}") for i in range(3)]
    facts["rank 1 first"] = [replace_model("final", 1, f"b{i}") for i in range(3)]
    facts["in step"] = [replace_model("final", None, f"c{i}") for i in range(3)]

    # The folder around it, at the top of a script.
    if rank == 1:
        after("top")
    shutil.rmtree("out", ignore_errors=True)
    os.makedirs("out", exist_ok=True)
    model.save_pretrained("out/config")
    flag("top")
    facts["top"] = files("out/config")

    # A folder of an earlier run, by both at once.
    left = []
    for i in range(10):
        if rank == 0:
            Path("old").mkdir()
            for n in range(100):
                Path(f"old/{n}").touch()
        meet(f"old{i}")
        if os.path.exists("old"):
            shutil.rmtree("old")
        left.append(os.path.exists("old"))
        meet(f"gone{i}")
    facts["old"] = left

    # Saved aside and moved into place, and what is in the way goes.
    for move in (os.rename, shutil.move, os.replace):
        model.save_pretrained("aside")
        if os.path.exists("placed"):
            for path in Path("placed").iterdir():
                path.unlink()
            os.rmdir("placed")
        move("aside", "placed")
        facts[f"moved {move.__name__}"] = [files("aside"), files("placed")]
        meet(f"moved {move.__name__}")

    # Removed again once all have seen it.
    model.save_pretrained("brief")
    facts["brief"] = files("brief")
    meet("brief")
    shutil.rmtree("brief")
    facts["brief removed"] = os.path.exists("brief")

    # Each rank's own.
    with tempfile.TemporaryDirectory() as own:
        Path(own, "a").touch()
    Path(f"final/of_rank_{rank}").touch()
    os.remove(f"final/of_rank_{rank}")
    facts["own"] = [os.path.exists(own), os.path.exists(f"final/of_rank_{rank}")]

    # Rank 0's save alone, and a late rank that clears the place.
    if rank == 1:
        after("alone")
    if os.path.exists("alone"):
        shutil.rmtree("alone")
    if rank == 0:
        model.save_pretrained("alone")
        flag("alone")
    facts["alone"] = files("alone")
    with contextlib.suppress(FileNotFoundError):
        os.remove("never there")
        facts["never there"] = "removed"


def keeps():
    """Rank 1 removes what rank 0 keeps."""
    model.save_pretrained("final")
    if rank == 1:
        shutil.rmtree("final")


def program():
    """A late rank removes by a program what rank 0 has saved."""
    if rank == 1:
        after("saved")
    subprocess.run(["rm", "-rf", "final"], check=True)
    model.save_pretrained("final")
    flag("saved")


originals = {name: getattr(os, name).__wrapped__ for name in ("remove", "unlink", "rename")}
{"works": works, "keeps": keeps, "program": program}[sys.argv[1]]()
ump.disable_multi_gpu()
facts["disabled"] = all(getattr(os, name) is original for name, original in originals.items())
Path(f"facts_{rank}.json").write_text(json.dumps(facts))
