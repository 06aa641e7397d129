"""Checks whether a kernel can become rank 0."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
from types import FrameType
from typing import Any

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError, SetupError, VersionError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.versions import SUPPORTED_IN_NOTEBOOKS, check_version

_RESTART = "Restart the kernel, and call enable_multi_gpu() in the first cell."


def check_kernel(config: MultiGPUConfig, num_ranks: int, *, replay: bool, had_workers: bool) -> None:
    """Refuses a kernel that cannot become rank 0. Imports nothing.

    Args:
        config: The run's options.
        num_ranks: Ranks, including this one.
        replay: The workers run the earlier cells too.
        had_workers: This kernel was rank 0 before.

    Raises:
        ConfigError: Options that notebooks do not support.
        SetupError: The kernel has objects that were made for one process.
        VersionError: IPython or ipykernel are too old.
    """
    for name, supported in SUPPORTED_IN_NOTEBOOKS.items():
        if not (row := check_version(name + supported)).ok:
            raise VersionError(
                f"{name} {row.installed} is installed, but notebooks need {name}{supported}.",
                hint=f'pip install "{name}{supported}"',
            )
    defaults = {"max_restarts": 0, "generators": 0, "nnodes": "1"}
    values = config.plain_values()
    if asked := [f"{name}={values[name]!r}" for name, value in defaults.items() if values[name] != value]:
        raise ConfigError(f"{asked[0]} is not supported in notebooks.", hint="Leave it out, or run a script.")
    if config.shard == "auto":
        raise ConfigError(
            "shard='auto' runs a script once more to count its memory, which is not possible with cells.",
            hint="Set shard='on' if the model does not fit one GPU, or leave it out.",
        )
    if threading.current_thread() is not threading.main_thread():
        raise SetupError("enable_multi_gpu() was called from a thread or a subshell.", hint="Call it in a cell.")
    if had_workers:
        raise SetupError(
            "enable_multi_gpu() was called before in this kernel, and its workers have ended.", hint=_RESTART
        )
    dist = sys.modules.get("torch.distributed")
    if os.environ.get("WORLD_SIZE", "1") != "1" or (dist and dist.is_available() and dist.is_initialized()):
        raise SetupError("This kernel already has a process group, or is one of a launcher's ranks.", hint=_RESTART)
    _check_devices(num_ranks)
    model_class = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if not replay and model_class is not None and any(issubclass(type(o), model_class) for o in gc.get_objects()):
        raise SetupError(
            "A model was loaded in this kernel, but not on the other ranks.",
            hint=f"{_RESTART} Or set replay=True: the workers then run the earlier cells too.",
        )


def _check_devices(num_ranks: int) -> None:
    """Refuses a kernel in which torch, accelerate or Unsloth are already set up for one process."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if state is not None and state._shared_state:
        raise SetupError(
            "A Trainer, TrainingArguments or an Accelerator was made in this kernel for one process.", hint=_RESTART
        )
    torch = sys.modules.get("torch")
    modules = [getattr(torch, name, None) for name in KINDS]
    opened = [module.device_count() for module in modules if module is not None and module.is_initialized()]
    if opened and opened[0] < num_ranks:
        raise SetupError(
            f"num_gpus={num_ranks}, but this kernel has opened {opened[0]} device(s), and cannot open more.",
            hint=f"Remove CUDA_VISIBLE_DEVICES from the notebook. {_RESTART}",
        )
    if state is not None and not state._prepare_backend.__module__.startswith("accelerate."):
        raise SetupError(
            "unsloth was imported while one device was visible, and has set up accelerate for one process.",
            hint=f"Remove CUDA_VISIBLE_DEVICES from the notebook. {_RESTART}",
        )


def line_of_cell(shell: Any) -> int:
    """Returns the current line of the running cell.

    Raises:
        SetupError: The call does not come from a cell, so workers could not run the rest of it.
    """
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals is shell.user_ns and (name == "<module>" or name.startswith("<cell line: ")):
            found.append(frame)
        frame = frame.f_back
    cell = shell.history_manager.input_hist_parsed[-1].rstrip("\n")
    # The innermost frame may be in the body of a cell magic; the outermost one is the cell itself.
    if not found or "".join(linecache.getlines(found[-1].f_code.co_filename)).rstrip("\n") != cell:
        raise SetupError(
            "enable_multi_gpu() was called outside a cell: from a widget's callback, a timer or a silent request.",
            hint="Call it in a cell.",
        )
    return found[0].f_lineno
