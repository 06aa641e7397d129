"""Which code is a library's, and which is the script's own?

Needs no torch.
"""

from __future__ import annotations

import functools
import sys

# Libraries that a training uses. They may be installed in a folder of their own, as a clone is.
LIBRARIES = frozenset(
    {
        "accelerate",
        "datasets",
        "huggingface_hub",
        "peft",
        "pyarrow",
        "safetensors",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
        "trl",
        "unsloth",
        "unsloth_multigpu",
        "unsloth_zoo",
    }
)
# What Unsloth writes beside a script when it compiles a model, and code that comes with a model from the Hub.
_GENERATED = ("Unsloth", "unsloth_compiled_module_", "transformers_modules")


@functools.cache
def is_library(module: str) -> bool:
    """True for what is installed or a part of Python, False for the script and the modules in its folder."""
    root = module.partition(".")[0]
    if root == "__main__":
        return False
    if root in sys.stdlib_module_names or root in LIBRARIES or root.startswith(_GENERATED):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
