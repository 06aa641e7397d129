"""Read by every Python that tests.helpers.run starts, so that it starts sooner and does the same.

Modules that `hide` names are not there, those of lazy_torch.py come when they are needed, garbage is collected seldom,
and what libraries find out from the installed files in each process is kept in a file next to this one.
"""

import atexit
import gc
import marshal
import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder

import lazy_torch

HIDDEN = {*os.environ.get("HIDDEN_MODULES", "").split(","), *os.environ.get("FAKE_CUDA_HIDES", "").split(",")}
KEPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__pycache__")

find = PathFinder.find_spec


class Without(PathFinder):
    """As if the hidden modules were not installed. None in sys.modules would look as if they were imported."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.startswith("torch.") and (found := lazy_torch.find(fullname, lambda: find(fullname, path))):
            return found
        spec = None if fullname in HIDDEN else find(fullname, path, target)
        if spec is not None and fullname in AFTER:
            call_after(spec.loader, AFTER[fullname])
        return spec

    @classmethod
    def find_distributions(cls, context):
        return [] if context.name in HIDDEN else super().find_distributions(context)


def call_after(loader, change):
    """Shows `change` the module once `loader` has run its code."""
    run = loader.exec_module

    def run_and_change(module):
        run(module)
        change(module)

    loader.exec_module = run_and_change


def keep_packages(metadata):
    """transformers, TRL and diffusers each ask which package a module is from: a quarter of a second."""
    find = metadata.packages_distributions
    metadata.packages_distributions = lambda: kept(find, installed())


def keep_structure(import_utils):
    """transformers reads the sources of all its models, twice: more than half a second."""
    find = import_utils.define_import_structure

    def define_import_structure(module_path, prefix=None):
        path = os.fspath(module_path)
        return kept(lambda: find(module_path, prefix), [path, prefix, os.stat(path).st_mtime_ns])

    import_utils.define_import_structure = define_import_structure


def freeze(_module):
    """Trainers and Unsloth collect all garbage, up to twenty times in a short run; what was imported is none."""
    gc.freeze()


AFTER = {
    "torch.distributed.tensor._api": lazy_torch.wait_for_parts,
    "importlib.metadata": keep_packages,
    "transformers.utils.import_utils": keep_structure,
    "transformers.trainer": freeze,
    "unsloth": freeze,
}


def installed():
    """Names of the folders of metadata that importlib.metadata finds."""
    found = []
    for path in sys.path:
        with suppress(OSError):
            found.append(sorted(name for name in os.listdir(path or ".") if name.endswith("-info")))
    return [names for names in found if names]


def kept(find, key):
    """What `find` returns, from a file if an earlier process had the same `key`."""
    import zlib

    file = os.path.join(KEPT, f"{zlib.crc32(repr(key).encode()):08x}.kept")
    with suppress(OSError, ValueError, EOFError, TypeError), open(file, "rb") as stored:
        for_key, found = marshal.load(stored)
        if for_key == key:
            return found
    found = find()
    with suppress(OSError):
        os.makedirs(KEPT, exist_ok=True)
        with open(f"{file}.{os.getpid()}", "wb") as own:
            marshal.dump((key, found), own)
        os.replace(own.name, file)
    return found


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
# Importing makes many objects, and they stay. What is left at the end goes with the process: looking for cycles in it
# takes as long as a quarter of the imports.
gc.set_threshold(100_000, 20, 1000)
atexit.register(gc.freeze)

if os.environ.get("FAKE_CUDA"):
    from importlib.util import module_from_spec, spec_from_file_location

    tests_helpers = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    fake_cuda = spec_from_file_location("fake_cuda", os.path.join(tests_helpers, "fake_cuda", "cuda.py"))
    sys.modules["fake_cuda"] = module_from_spec(fake_cuda)
    fake_cuda.loader.exec_module(sys.modules["fake_cuda"])
    sys.modules["fake_cuda"].install()
