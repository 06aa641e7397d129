"""Trains a one-GPU fine-tuning script on every GPU after one line. Importing this package does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import ConfigError as ConfigError
from unsloth_multigpu.errors import DistributedError as DistributedError
from unsloth_multigpu.errors import DivergenceError as DivergenceError
from unsloth_multigpu.errors import FederatedError as FederatedError
from unsloth_multigpu.errors import GeneratorError as GeneratorError
from unsloth_multigpu.errors import LaunchError as LaunchError
from unsloth_multigpu.errors import MultiGPUError as MultiGPUError
from unsloth_multigpu.errors import NonFiniteGradientError as NonFiniteGradientError
from unsloth_multigpu.errors import PatchError as PatchError
from unsloth_multigpu.errors import RankTimeoutError as RankTimeoutError
from unsloth_multigpu.errors import ResumeError as ResumeError
from unsloth_multigpu.errors import SaveError as SaveError
from unsloth_multigpu.errors import SetupError as SetupError
from unsloth_multigpu.errors import VersionError as VersionError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unsloth_multigpu.federated.server import create_multigpu_flower_server as create_multigpu_flower_server
    from unsloth_multigpu.federated.training import FederatedServer as FederatedServer
    from unsloth_multigpu.options import MultiGPUConfig as MultiGPUConfig
    from unsloth_multigpu.plain.plain_loop import distributed_loader as distributed_loader
    from unsloth_multigpu.plain.plain_loop import unwrap_model as unwrap_model
    from unsloth_multigpu.plain.plain_loop import wrap_model_multi_gpu as wrap_model_multi_gpu
    from unsloth_multigpu.plugin import MultiGPUStatus as MultiGPUStatus
    from unsloth_multigpu.plugin import disable_multi_gpu as disable_multi_gpu
    from unsloth_multigpu.plugin import enable_multi_gpu as enable_multi_gpu
    from unsloth_multigpu.plugin import get_active_config as get_active_config
    from unsloth_multigpu.plugin import get_multi_gpu_status as get_multi_gpu_status
    from unsloth_multigpu.plugin import is_main_process as is_main_process
    from unsloth_multigpu.plugin import is_multi_gpu_enabled as is_multi_gpu_enabled
    from unsloth_multigpu.plugin import on_main_process as on_main_process
    from unsloth_multigpu.report import RankReport as RankReport
    from unsloth_multigpu.report import RunReport as RunReport
    from unsloth_multigpu.strategy import DDP as DDP
    from unsloth_multigpu.strategy import AllReduce as AllReduce
    from unsloth_multigpu.strategy import DiLoCo as DiLoCo
    from unsloth_multigpu.strategy import LocalSGD as LocalSGD
    from unsloth_multigpu.strategy import ParameterServer as ParameterServer

# Further public names by the module that defines them. They are imported on first access.
_NAMES_BY_MODULE = {
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
    "report": ("RankReport", "RunReport"),
    "strategy": ("DDP", "AllReduce", "DiLoCo", "LocalSGD", "ParameterServer"),
    "plain.plain_loop": ("distributed_loader", "unwrap_model", "wrap_model_multi_gpu"),
    "federated.server": ("create_multigpu_flower_server",),
    "federated.training": ("FederatedServer",),
}
_ERRORS = [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, MultiGPUError)]
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_MODULE_OF |= dict.fromkeys(_ERRORS, "errors")

if not TYPE_CHECKING:  # A computed list would hide the names above from a type checker.
    __all__ = [*sorted(_MODULE_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*_MODULE_OF, "__version__"]
