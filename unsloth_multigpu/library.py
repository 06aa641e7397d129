"""Which modules belong to libraries, and which to the user's script."""

from __future__ import annotations

import functools
import sys

from unsloth_multigpu.versions import SUPPORTED

# Libraries of a training, which may also be installed in another folder, such as a clone.
_LIBRARIES = {*SUPPORTED, "huggingface_hub", "pyarrow", "safetensors", "tokenizers", "tqdm", "unsloth_multigpu"}
# Modules that Unsloth generates when it compiles a model, and code that comes with a model from the Hub.
_GENERATED = ("Unsloth", "unsloth_compiled_module_", "transformers_modules")


@functools.cache
def is_library(module: str) -> bool:
    """True for installed modules and those of Python, False for the script and modules in its folder."""
    root = module.partition(".")[0]
    if root == "__main__":
        return False
    if root in sys.stdlib_module_names or root in _LIBRARIES or root.startswith(_GENERATED):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
