"""A script that asks on rank 0, and then misses a file, which concerns all ranks; with "ask" all ranks ask."""

import getpass
import json
import sys
from pathlib import Path

import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=2)

if ump.is_main_process():
    print("alone:", input("only rank 0? "))
rank = ump.get_multi_gpu_status().rank
Path(f"status_{rank}.json").write_text(json.dumps(repr(ump.get_multi_gpu_status())))
if sys.argv[1] == "ask":
    getpass.getpass("token: ")


def load(path):
    return Path(path).read_text()


if __name__ == "__main__":
    load(sys.argv[1])
