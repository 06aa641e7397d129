"""Read by every Python that tests.helpers.run starts: less garbage collection, and without what `hide` names."""

import atexit
import gc
import os
import sys
from importlib.machinery import PathFinder

HIDDEN = set(os.environ.get("HIDDEN_MODULES", "").split(","))


class Without(PathFinder):
    """As if the hidden modules were not installed. None in sys.modules would look as if they were imported."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, context):
        return [] if context.name in HIDDEN else super().find_distributions(context)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
# Importing makes many objects, and they stay. What is left at the end goes with the process: looking for cycles in it
# takes as long as a quarter of the imports.
gc.set_threshold(100_000)
atexit.register(gc.freeze)
