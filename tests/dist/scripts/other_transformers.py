"""Trains two steps with a transformers whose Trainer was changed: a text of its source is replaced by another.

Usage: other_transformers.py --num-gpus N OLD NEW
"""

import argparse
import importlib.abc
import importlib.machinery
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--num-gpus", type=int, required=True)
parser.add_argument("old")
parser.add_argument("new")
args = parser.parse_args()


class Changed(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_source(fullname)
        assert args.old in source
        return compile(source.replace(args.old, args.new), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "transformers.trainer":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Changed(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=args.num_gpus, on_nan="skip")
from onion_look import train

train("checkpoints")
