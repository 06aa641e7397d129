"""Which wrappers may stand around a model?"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def inner_name(module: nn.Module) -> str | None:
    """Under which name a wrapper holds its model; None for a module that is no wrapper."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    # Importing the compiler takes a second; where nobody has, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return "_orig_mod" if compiler is not None and isinstance(module, compiler.OptimizedModule) else None
