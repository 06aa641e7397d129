"""Trains two steps for each set of options, and writes what of ours stood where on the Trainer meanwhile.

Usage: onion.py RANKS OUT_FILE OPTIONS..., which are JSON objects for enable_multi_gpu().
"""

import json
import os
import sys

import unsloth_multigpu as ump

num_ranks, every = int(sys.argv[1]), [json.loads(options) for options in sys.argv[3:]]
ump.enable_multi_gpu(num_gpus=num_ranks, **every[0])

from onion_look import train

found = []
for number, options in enumerate(every):
    if number:
        ump.disable_multi_gpu()
        ump.enable_multi_gpu(num_gpus=num_ranks, **options)
    found.append(train(f"checkpoints_{number}"))
if os.environ.get("RANK", "0") == "0":
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
