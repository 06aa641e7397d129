"""`enable_multi_gpu()` in a notebook: this kernel becomes rank 0, and workers run every later cell, too."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from unsloth_multigpu.accelerator import KINDS, backend_of
from unsloth_multigpu.errors import (
    ConfigError,
    DistributedError,
    DivergenceError,
    MultiGPUError,
    SetupError,
    VersionError,
)
from unsloth_multigpu.group.manager import local_device
from unsloth_multigpu.hooks.shard import SHARD_VARIABLES
from unsloth_multigpu.launch.launcher import rank_environment
from unsloth_multigpu.launch.rank import last_collective
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.notebook.cell_program import KernelProgram
from unsloth_multigpu.notebook.display import Panel
from unsloth_multigpu.notebook.kernel import ALONE, Kernel, WorkerProcess
from unsloth_multigpu.notebook.kernel_share import variables_set
from unsloth_multigpu.notebook.monitor import Monitor
from unsloth_multigpu.notebook.recovery import abort_group, close_group
from unsloth_multigpu.notebook.shell import KernelShell
from unsloth_multigpu.options import ENV_NOTEBOOK, MultiGPUConfig
from unsloth_multigpu.session import Session, open_session
from unsloth_multigpu.versions import SUPPORTED_IN_NOTEBOOKS, check_version
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import only_here, threads_of_each
from unsloth_multigpu.wire.run import exclusive_log_dir, private_dir, write_run

logger = get_logger(__name__)

_START_LIMIT_S = 120.0
_END_LIMIT_S = 2.0
_JOB = "notebook"
_RESTART = "Restart the kernel, and call enable_multi_gpu() in the first cell."
# Set while this kernel is a rank: its device for accelerate, what the device cannot do for NCCL, and sharding.
_RANK_VARIABLES = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_BYPASS_DEVICE_MAP"),
    *("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", *SHARD_VARIABLES),
)
# Without these, an error in ProcessGroupNCCL ends the kernel's process.
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def open_notebook(config: MultiGPUConfig, num_ranks: int, shell: Any, *, replay: bool, had_workers: bool) -> Session:
    """Makes this kernel rank 0 of `num_ranks`, and runs the rest of the current cell on all ranks.

    With `replay` the workers run the earlier cells too, although a model was loaded in them. With `had_workers` this
    kernel was rank 0 before.

    Raises:
        SetupError: The kernel has objects that were made for one process, or has run no cell.
        DistributedError: A worker has ended, or an earlier cell failed on it.
        LaunchError: Starting a worker, or an earlier cell on it, took too long.
    """
    check_kernel(config, num_ranks, replay=replay, had_workers=had_workers)
    cells = shell.history_manager.input_hist_parsed[1:]
    if not cells:
        raise SetupError("enable_multi_gpu() was called before the first cell.", hint="Call it in a cell.")
    begin_s = time.monotonic()
    with ExitStack() as stack:
        on_close = stack.enter_context(ExitStack())  # The session's, closed here too if the session cannot be opened.
        notebook = Notebook(config, num_ranks, shell, stack)
        notebook.replay(cells)
        session = notebook.open_session(on_close)
        session.on_close.push(stack.pop_all())
        stack.callback(session.close)
        notebook.kernel_shell.open(cells[-1], len(cells))
        stack.pop_all()
    session.had_workers = True
    logger.info("ready in %.1f s", time.monotonic() - begin_s)
    return session


def check_kernel(config: MultiGPUConfig, num_ranks: int, *, replay: bool, had_workers: bool) -> None:
    """Refuses a kernel that cannot become rank 0. Imports nothing. Arguments: see `open_notebook`.

    Raises:
        ConfigError: Options that notebooks do not support.
        SetupError: The kernel has objects that were made for one process, or this is no call in a cell.
        VersionError: IPython or ipykernel is too old.
    """
    for name, versions in SUPPORTED_IN_NOTEBOOKS.items():
        if not (row := check_version(name + versions)).ok:
            raise VersionError(
                f"{name} {row.installed} is installed, but notebooks need {name}{versions}.",
                hint=f'pip install "{name}{versions}"',
            )
    values = config.plain_values()
    supported: dict[str, list[Any]] = {"max_restarts": [0], "generators": [0], "nnodes": [1], "shard": ["off", "on"]}
    for option, allowed in supported.items():
        if values[option] not in allowed:
            raise ConfigError(
                f"{option}={values[option]!r} is not supported in notebooks.",
                hint=f"Set {' or '.join(map(repr, allowed))}, or run a script.",
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
    """Refuses a kernel in which accelerate is set up for one process, or torch has opened too few devices."""
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


class Notebook:
    """The ranks of one kernel, until `disable_multi_gpu` or until a worker dies.

    The caller closes `stack`, which holds everything that is opened here.
    """

    def __init__(self, config: MultiGPUConfig, num_ranks: int, shell: Any, stack: ExitStack) -> None:
        self._config = config
        self._generation = 0
        self._identity, *others = [RankIdentity(r, r, num_ranks, num_ranks, "notebook") for r in range(num_ranks)]
        self.run_dir = stack.enter_context(private_dir())
        self.log_dir = stack.enter_context(exclusive_log_dir(Path(config.log_dir), num_ranks))
        run = write_run(self.run_dir, _JOB, _JOB, num_ranks, self.log_dir)
        run_id = uuid.uuid4().hex
        variables = rank_environment(config, num_ranks, self.run_dir, self.log_dir, run_id, os.environ)
        values = {**variables, **_NCCL, **self._identity.variables()}
        before = {name: os.environ.get(name) for name in (*values, *_RANK_VARIABLES)}
        stack.enter_context(variables_set({**before, **values}))
        settings = {"path": sys.path, "before": before, "options": config.of_the_run()}
        workers: list[WorkerProcess] = []
        self.kernel = Kernel(workers, last_collective)
        for other in others:
            environment = {**os.environ, **other.variables(), ENV_NOTEBOOK: json.dumps(settings)}
            workers.append(WorkerProcess(other.rank, self.log_dir / f"rank_{other.rank}.log", environment))
            stack.callback(workers[-1].close, _END_LIMIT_S)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        # The kernel has a thread for each core, and the cores are now shared by the ranks.
        torch.set_num_threads(threads_of_each(num_ranks))
        stack.callback(close_group)
        # Before close_group, where NCCL would wait for the other ranks: they exit without closing the group.
        stack.callback(abort_group, self.kernel.pids)
        stack.callback(Monitor(self.kernel, self.run_dir, config.hang_timeout_s).close)
        self.kernel_shell = KernelShell(shell, self.kernel, self.after_cell, before, run)
        stack.callback(self.kernel_shell.close)
        self.program = KernelProgram(self.kernel, self.kernel_shell.publisher, panel := Panel(run))
        stack.callback(panel.end)
        # At exit the kernel only kills its workers: its front end waits for it to exit.
        kill_workers = only_here(self._kill_workers)
        atexit.register(kill_workers)
        stack.callback(atexit.unregister, kill_workers)

    def replay(self, cells: Sequence[str]) -> None:
        """Runs the cells of this kernel on the workers, the last one up to `enable_multi_gpu()`. No group is open."""
        self.kernel.wait_for(lambda worker: worker.is_ready, "starting the workers", _START_LIMIT_S)
        for number, source in enumerate(cells, 1):
            if source.strip():
                has_line = number == len(cells)
                self.kernel.replay(source, self._config.timeout_s, execution_count=number, has_line=has_line)

    def open_session(self, on_close: ExitStack) -> Session:
        """Opens the process group and the session of rank 0."""
        self._open_group()
        # Read now, because this kernel has the variables of a rank only since `__init__`.
        context = RunContext.read(os.environ)
        return open_session(Session(self._config, self._identity, context, program=self.program, on_close=on_close))

    def after_cell(self) -> None:
        """Called between two cells: opens a new process group if the last cell broke the old one.

        Raises DivergenceError if a model has different tensors on the ranks, which cannot get rank 0's weights then.
        Raises DistributedError if the ranks cannot open a new process group; this kernel then continues alone.
        """
        trainings = self.program.trainings
        is_interrupted = trainings is not None and trainings.is_interrupted
        shown: MultiGPUError | None = None
        if not self._dead() and (self.kernel.is_broken or is_interrupted):
            try:
                self._open_group()
            except DivergenceError as divergence:
                shown = divergence  # The group itself is open.
            except (RuntimeError, OSError, MultiGPUError, KeyboardInterrupt) as failed:
                shown = self._give_up(failed)
        if self._dead():
            logger.warning("this kernel continues alone: %s", self._dead()[0].describe_end())
            if (session := self.program.session) is not None:
                session.close()
        if shown is not None:
            raise shown

    def _dead(self) -> list[WorkerProcess]:
        return [worker for worker in self.kernel.workers if worker.exit_code is not None]

    def _give_up(self, failed: BaseException) -> DistributedError:
        for worker in self.kernel.workers:
            worker.kill("the ranks could not open a new process group")
        with self.kernel.changed:  # The monitor collects their exit codes.
            self.kernel.changed.wait_for(lambda: len(self._dead()) == len(self.kernel.workers), _END_LIMIT_S)
        error = DistributedError(
            f"The ranks could not open a new process group after the cell ({type(failed).__name__}: {failed}).",
            hint=ALONE,
        )
        error.__cause__ = failed
        return error

    def _open_group(self) -> None:
        """Opens a new process group on all ranks. The models of its Trainers get rank 0's weights."""
        config = self._config
        self._generation += 1
        order = {
            "generation": self._generation,
            "backend": backend_of(local_device(self._identity, config).type),
            "timeout_s": config.timeout_s,
            "pids": self.kernel.pids,
            "is_broken": self.kernel.is_broken,
            **self.program.order(),
        }
        self.kernel.begin_group(order)
        try:
            self.program.join_group(order)
        except BaseException as error:
            shown = self.kernel.finish(error)
            if shown is None:
                raise
            raise shown from error
        if (shown := self.kernel.finish(None)) is not None:
            raise shown

    def _kill_workers(self) -> None:
        """Called when the kernel exits. Also removes the run's folder."""
        for worker in self.kernel.workers:
            worker.kill()
        shutil.rmtree(self.run_dir, ignore_errors=True)
