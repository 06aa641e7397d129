"""The settings of torch's allocator for devices that Unsloth sets, early enough for a rank.

`import unsloth` sets them before it imports torch. In a rank, `enable_multi_gpu()` runs before that import and chooses
the rank's device. That builds the allocator, which reads its settings once. What Unsloth sets later would have no
effect, and a script that just fits on one GPU could run out of memory on two.

Needs no torch.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from unsloth_multigpu.versions import installed_version

# The variables by which a user can set the allocator. An empty value counts as set.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
# What Unsloth adds for versions of torch that read PYTORCH_CUDA_ALLOC_CONF.
_ROUNDED = f"{_EXPANDABLE},roundup_power2_divisions:[32:256,64:128,256:64,>:32]"
_BOARD_FILES = ("/etc/nv_tegra_release", "/proc/device-tree/compatible", "/sys/class/dmi/id/product_name")


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings for a rank. Empty where one process has none: Unsloth sets nothing, or is not installed.

    Reads metadata, and imports neither torch nor Unsloth.

    Args:
        environment: The variables of the process. What the user has set is kept.
    """
    torch_version = installed_version("torch")
    if installed_version("unsloth_zoo") is None or torch_version is None:
        return {}
    if any(name in environment for name in VARIABLES) or environment.get("UNSLOTH_VLLM_STANDBY", "0") != "0":
        return {}
    # ROCm and WSL have no expandable segments, and Tegra's calls for them fail.
    if "+rocm" in torch_version or _is_wsl(environment) or _is_tegra(environment):
        return {}
    numbers = [int(number) for number in re.findall(r"\d+", torch_version)[:2]]
    return {"PYTORCH_ALLOC_CONF": _EXPANDABLE} if numbers >= [2, 10] else {"PYTORCH_CUDA_ALLOC_CONF": _ROUNDED}


def _is_wsl(environment: Mapping[str, str]) -> bool:
    # A container on WSL does not have WSL's variables, but it has its kernel.
    names = ("WSL_DISTRO_NAME", "WSL_INTEROP")
    return any(environment.get(name) for name in names) or "microsoft" in platform.release().lower()


def _is_tegra(environment: Mapping[str, str]) -> bool:
    """True on a Jetson board; Unsloth's own variable decides if it is set."""
    forced = environment.get("UNSLOTH_FORCE_EXPANDABLE_SEGMENTS", "").strip().lower()
    if forced in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        return forced in ("0", "false", "no", "off")
    if not platform.machine().lower().startswith(("aarch64", "arm")):
        return False
    # The names of the files count as well: of NVIDIA's release file only the name says what the board is.
    boards = " ".join(f"{os.path.basename(n)} {_read(n)}" for n in _BOARD_FILES if os.path.exists(n)).lower()
    # GB10 (DGX Spark) is derived from Tegra, but it supports expandable segments.
    is_capable = any(name in boards for name in ("gb10", "dgx spark", "dgx-spark", "dgx_spark"))
    return not is_capable and any(name in boards for name in ("tegra", "jetson"))


def _read(name: str) -> str:
    try:
        return Path(name).read_bytes()[:4096].replace(b"\0", b" ").decode(errors="ignore")
    except OSError:
        return ""
