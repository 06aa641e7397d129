"""Draws without a seed, in ranks that another launcher started."""

import json
import os
import random

import unsloth_multigpu as ump

ump.enable_multi_gpu()

import numpy
import torch

drawn = {
    "torch": float(torch.rand(())),
    "random": random.random(),
    "numpy": float(numpy.random.rand()),
    "split": torch.utils.data.random_split(range(20), [10, 10])[0].indices,
    # What a device is seeded with when it is opened.
    "seed of devices": torch.initial_seed(),
    "set": list({"negative", "neutral", "positive", "mixed", "unknown", "none"}),
}
ump.disable_multi_gpu()
ump.enable_multi_gpu(num_gpus=2)
drawn["torch, enabled again"] = float(torch.rand(()))
with open(f"drawn_{os.environ['RANK']}.json", "w") as file:
    json.dump(drawn, file)
