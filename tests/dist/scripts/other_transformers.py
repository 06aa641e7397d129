"""Trains two steps with a transformers whose Trainer was changed: a text of its source is replaced by another.

Usage: other_transformers.py RANKS OLD NEW
"""

import importlib.abc
import importlib.machinery
import sys

num_ranks, old, new = sys.argv[1:]


class Changed(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_source(fullname)
        assert old in source
        return compile(source.replace(old, new), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "transformers.trainer":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Changed(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
import unsloth_multigpu as ump

ump.enable_multi_gpu(num_gpus=int(num_ranks), on_nan="skip")
from onion_look import train

train("checkpoints")
