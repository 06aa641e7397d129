"""One line makes a one-GPU fine-tuning script train on every GPU. Importing this package loads nothing heavy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unsloth_multigpu.errors import (
        ConfigError,
        DistributedError,
        DivergenceError,
        FederatedError,
        LaunchError,
        MultiGPUError,
        NonFiniteGradientError,
        PatchError,
        RankTimeoutError,
        ResumeError,
        SaveError,
        SetupError,
        VersionError,
    )
    from unsloth_multigpu.federated.server import FederatedServer, create_multigpu_flower_server
    from unsloth_multigpu.options import MultiGPUConfig
    from unsloth_multigpu.plain.api import distributed_loader, save_state_dict, wrap_model_multi_gpu
    from unsloth_multigpu.plain.state import load_state_dict
    from unsloth_multigpu.plain.wrap import unwrap_model
    from unsloth_multigpu.plugin import (
        MultiGPUStatus,
        disable_multi_gpu,
        enable_multi_gpu,
        get_active_config,
        get_multi_gpu_status,
        is_main_process,
        is_multi_gpu_enabled,
        on_main_process,
    )
    from unsloth_multigpu.report import RankReport, RunReport
    from unsloth_multigpu.strategy import DDP, AllReduce, DiLoCo, LocalSGD, ParameterServer

_HOMES = {
    "plugin": (
        "MultiGPUStatus",
        "disable_multi_gpu",
        "enable_multi_gpu",
        "get_active_config",
        "get_multi_gpu_status",
        "is_main_process",
        "is_multi_gpu_enabled",
        "on_main_process",
    ),
    "options": ("MultiGPUConfig",),
    "errors": (
        "ConfigError",
        "DistributedError",
        "DivergenceError",
        "FederatedError",
        "LaunchError",
        "MultiGPUError",
        "NonFiniteGradientError",
        "PatchError",
        "RankTimeoutError",
        "ResumeError",
        "SaveError",
        "SetupError",
        "VersionError",
    ),
    "report": ("RankReport", "RunReport"),
    "strategy": ("DDP", "AllReduce", "DiLoCo", "LocalSGD", "ParameterServer"),
    "plain.api": ("distributed_loader", "save_state_dict", "wrap_model_multi_gpu"),
    "plain.state": ("load_state_dict",),
    "plain.wrap": ("unwrap_model",),
    "federated.server": ("FederatedServer", "create_multigpu_flower_server"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DDP",
    "AllReduce",
    "ConfigError",
    "DiLoCo",
    "DistributedError",
    "DivergenceError",
    "FederatedError",
    "FederatedServer",
    "LaunchError",
    "LocalSGD",
    "MultiGPUConfig",
    "MultiGPUError",
    "MultiGPUStatus",
    "NonFiniteGradientError",
    "ParameterServer",
    "PatchError",
    "RankReport",
    "RankTimeoutError",
    "ResumeError",
    "RunReport",
    "SaveError",
    "SetupError",
    "VersionError",
    "__version__",
    "create_multigpu_flower_server",
    "disable_multi_gpu",
    "distributed_loader",
    "enable_multi_gpu",
    "get_active_config",
    "get_multi_gpu_status",
    "is_main_process",
    "is_multi_gpu_enabled",
    "load_state_dict",
    "on_main_process",
    "save_state_dict",
    "unwrap_model",
    "wrap_model_multi_gpu",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
