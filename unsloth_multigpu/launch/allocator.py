"""Unsloth's settings of torch's CUDA allocator, for ranks. Needs no torch.

`import unsloth` sets them before it imports torch. In a rank, `enable_multi_gpu()` has opened the device before, which
reads the settings once. Without them a script that just fits on one GPU could run out of memory on two.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

from unsloth_multigpu.versions import installed_version

# Variables of the allocator. An empty value counts as set.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
# Unsloth's value for versions of torch that read PYTORCH_CUDA_ALLOC_CONF.
_ROUNDED = f"{_EXPANDABLE},roundup_power2_divisions:[32:256,64:128,256:64,>:32]"


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that Unsloth would set; empty if it is not installed or sets none, or the user has."""
    torch_version = installed_version("torch")
    if installed_version("unsloth_zoo") is None or torch_version is None:
        return {}
    if any(name in environment for name in VARIABLES) or environment.get("UNSLOTH_VLLM_STANDBY", "0") != "0":
        return {}
    # ROCm and WSL have no expandable segments. Containers on WSL share its kernel.
    if "+rocm" in torch_version or "microsoft" in platform.release().lower():
        return {}
    numbers = [int(number) for number in re.findall(r"\d+", torch_version)[:2]]
    return {"PYTORCH_ALLOC_CONF": _EXPANDABLE} if numbers >= [2, 10] else {"PYTORCH_CUDA_ALLOC_CONF": _ROUNDED}
