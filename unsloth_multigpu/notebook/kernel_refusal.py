"""Which kernels cannot become rank 0, and why."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import ConfigError, SetupError, VersionError
from unsloth_multigpu.notebook.cell import kept_value
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.versions import SUPPORTED_IN_NOTEBOOKS, check_version

_RESTART = "Restart the kernel, and call enable_multi_gpu() in the first cell."


@dataclass(frozen=True)
class KernelState:
    """What this kernel holds.

    Args:
        is_main_thread: The call comes from the main thread.
        had_workers: It was rank 0 before.
        has_group: torch.distributed is initialised, or a launcher's variables tell of other ranks.
        has_accelerator: A Trainer, TrainingArguments or an Accelerator were made.
        has_model: A model of transformers was loaded.
        num_devices: Accelerators that torch has opened in this kernel; None = none yet.
        is_one_device: Unsloth was imported while it saw one device, and has limited accelerate to one process.
    """

    is_main_thread: bool = True
    had_workers: bool = False
    has_group: bool = False
    has_accelerator: bool = False
    has_model: bool = False
    num_devices: int | None = None
    is_one_device: bool = False


def check_kernel(config: MultiGPUConfig, num_ranks: int, *, replay: bool, had_workers: bool) -> None:
    """Refuses a kernel that cannot become rank 0.

    Args:
        config: The run's options.
        num_ranks: Ranks, with this one.
        replay: The workers run the earlier cells too.
        had_workers: This kernel was rank 0 before.

    Raises:
        ConfigError: Options that a notebook does not have.
        SetupError: The kernel holds what was made for one process.
        VersionError: IPython or ipykernel are too old.
    """
    for name, supported in SUPPORTED_IN_NOTEBOOKS.items():
        if not (row := check_version(name + supported)).ok:
            raise VersionError(
                f"{name} {row.installed} is installed, but notebooks need {name}{supported}.",
                hint=f'pip install "{name}{supported}"',
            )
    refuse(read_state(had_workers=had_workers), config, num_ranks, replay=replay)


def check_earlier_cells(cells: Iterable[str]) -> None:
    """Refuses transformed cells that the workers cannot run again.

    Raises:
        SetupError: One keeps a value that only this process has.
    """
    for statement in filter(None, map(kept_value, cells)):
        raise SetupError(
            f"enable_multi_gpu() comes after `{statement[:200]}`: the other ranks run that cell again, and this value "
            "is known in this process alone.",
            hint=f"{_RESTART} What follows it is asked and run once, and its values reach all ranks.",
        )


def refuse(state: KernelState, config: MultiGPUConfig, num_ranks: int, *, replay: bool) -> None:
    """Raises for the first reason that is found; see `check_kernel`."""
    if config.max_restarts or config.nnodes != "1":
        name = f"max_restarts={config.max_restarts}" if config.max_restarts else f"nnodes={config.nnodes!r}"
        raise ConfigError(f"{name} is for scripts; a notebook's ranks are one kernel's.", hint="Leave it out.")
    if config.shard != "off":
        raise SetupError(
            f"shard={config.shard!r} is for scripts: after Stop all ranks of a notebook get rank 0's whole weights.",
            hint="Run it as a script (jupyter nbconvert --to script), or leave shard out.",
        )
    if not state.is_main_thread:
        raise SetupError("enable_multi_gpu() was called from a thread or a subshell.", hint="Call it in a cell.")
    if state.had_workers:
        raise SetupError("enable_multi_gpu() was in effect in this kernel before, its workers are gone.", hint=_RESTART)
    if state.has_group:
        raise SetupError("This kernel already has a process group, or is one of a launcher's ranks.", hint=_RESTART)
    if state.has_accelerator:
        raise SetupError(
            "A Trainer, TrainingArguments or an Accelerator were made in this kernel for one process.", hint=_RESTART
        )
    if state.num_devices is not None and state.num_devices < num_ranks:
        raise SetupError(
            f"num_gpus={num_ranks}, but this kernel has opened {state.num_devices} device(s), and cannot open more.",
            hint=f"Take CUDA_VISIBLE_DEVICES out of the notebook. {_RESTART}",
        )
    if state.is_one_device:
        raise SetupError(
            "unsloth was imported while one device was visible, and has told accelerate that there is one process.",
            hint=f"Take CUDA_VISIBLE_DEVICES out of the notebook. {_RESTART}",
        )
    if state.has_model and not replay:
        raise SetupError(
            "A model was loaded in this kernel, and the other ranks do not have it.",
            hint=f"{_RESTART} Or set replay=True: the workers then run the earlier cells too.",
        )


def read_state(*, had_workers: bool) -> KernelState:
    """Looks at this process. Imports nothing.

    Args:
        had_workers: See `check_kernel`.
    """
    torch, dist = sys.modules.get("torch"), sys.modules.get("torch.distributed")
    accelerate = sys.modules.get("accelerate.state")
    transformers = sys.modules.get("transformers.modeling_utils")
    model_class = getattr(transformers, "PreTrainedModel", None)
    partial_state = getattr(accelerate, "PartialState", None)
    modules = () if torch is None else (getattr(torch, name, None) for name in KINDS)
    opened = next((module for module in modules if module is not None and module.is_initialized()), None)
    return KernelState(
        is_main_thread=threading.current_thread() is threading.main_thread(),
        had_workers=had_workers,
        has_group=os.environ.get("WORLD_SIZE", "1") != "1"
        or bool(dist and dist.is_available() and dist.is_initialized()),
        has_accelerator=partial_state is not None and bool(partial_state._shared_state),
        has_model=model_class is not None and any(issubclass(type(o), model_class) for o in gc.get_objects()),
        num_devices=None if opened is None else opened.device_count(),
        is_one_device=partial_state is not None and not _is_accelerates(partial_state._prepare_backend),
    )


def _is_accelerates(function: Any) -> bool:
    return bool(function.__module__.startswith("accelerate."))


def line_of_cell(shell: Any) -> int:
    """The line of the running cell that is executed at present.

    Raises:
        SetupError: The call does not come from a cell, which the workers could run from there.
    """
    found = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals is shell.user_ns and (name == "<module>" or name.startswith("<cell line: ")):
            found.append(frame)
        frame = frame.f_back
    cell = shell.history_manager.input_hist_parsed[-1].rstrip("\n")
    # The innermost one is in the body of a cell magic; the outermost one is the cell itself.
    if not found or "".join(linecache.getlines(found[-1].f_code.co_filename)).rstrip("\n") != cell:
        raise SetupError(
            "enable_multi_gpu() was called outside a cell: from a widget's callback, a timer or a silent request.",
            hint="Call it in a cell.",
        )
    return found[0].f_lineno
