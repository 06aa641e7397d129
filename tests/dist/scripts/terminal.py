"""A script that asks, and then misses a file: both concern all ranks."""

import getpass
import json
import sys
import time
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

if ump.is_main_process():
    print("alone:", input("only rank 0? "))
rank = ump.get_multi_gpu_status().rank
answers = [input("name? "), getpass.getpass("token: ")]
Path(f"answers_{rank}.json").write_text(json.dumps([*answers, repr(ump.get_multi_gpu_status())]))
# The first error ends the other rank.
while not all(Path(f"answers_{n}.json").exists() and Path(f"answers_{n}.json").stat().st_size for n in range(2)):
    time.sleep(0.01)


def load(path):
    return Path(path).read_text()


if __name__ == "__main__":
    load(sys.argv[1])
