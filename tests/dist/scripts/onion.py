"""Trains two steps for each set of options, and writes what of ours stood where on the Trainer meanwhile.

Usage: onion.py --num-gpus N --out FILE OPTIONS...
OPTIONS are JSON objects for enable_multi_gpu(); more than one only where a single process trains.
"""

import argparse
import json
import os

import unsloth_multigpu as ump

parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int, required=True)
parser.add_argument("--out", required=True)
parser.add_argument("options", nargs="+", type=json.loads)
args = parser.parse_args()
ump.enable_multi_gpu(num_gpus=args.num_gpus, **args.options[0])

from onion_look import train

found = []
for number, options in enumerate(args.options):
    if number:
        ump.disable_multi_gpu()
        ump.enable_multi_gpu(num_gpus=args.num_gpus, **options)
    found.append(train(f"checkpoints_{number}"))
if os.environ.get("RANK", "0") == "0":
    with open(args.out, "w") as file:
        json.dump(found, file)
