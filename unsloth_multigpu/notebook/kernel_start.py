"""`enable_multi_gpu()` in a notebook: this kernel becomes rank 0, and workers run every later cell, too."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from unsloth_multigpu.accelerator import backend_of
from unsloth_multigpu.errors import DistributedError, DivergenceError, MultiGPUError
from unsloth_multigpu.logs import Console, get_logger
from unsloth_multigpu.notebook.cell import is_python, split_at
from unsloth_multigpu.notebook.cell_program import KernelProgram
from unsloth_multigpu.notebook.kernel import Kernel
from unsloth_multigpu.notebook.kernel_refusal import check_kernel, line_of_cell
from unsloth_multigpu.notebook.monitor import Monitor
from unsloth_multigpu.notebook.panel import Panel
from unsloth_multigpu.notebook.shell import KernelShell
from unsloth_multigpu.notebook.variables import DEVICE_VARIABLES, RankVariables
from unsloth_multigpu.notebook.worker_process import WorkerProcess
from unsloth_multigpu.options import ENV_NOTEBOOK, MultiGPUConfig
from unsloth_multigpu.session import Session
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.folder import exclusive_log_dir, private_dir
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import only_here, threads_of_each
from unsloth_multigpu.wire.run import write_run

logger = get_logger(__name__)

_START_LIMIT_S = 120.0
_END_LIMIT_S = 2.0
_JOB = "notebook"
# Keeps an error in ProcessGroupNCCL from ending the kernel's process.
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def open_notebook(
    config: MultiGPUConfig, num_ranks: int, console: Console, shell: Any, *, replay: bool, had_workers: bool
) -> Session:
    """Makes this kernel rank 0 of `num_ranks`, and runs the rest of the current cell on all ranks.

    Args:
        config: The run's options.
        num_ranks: Ranks, including this one.
        console: Where logs go.
        shell: `get_ipython()`.
        replay: The workers run the earlier cells too, although a model was loaded in them.
        had_workers: This kernel was rank 0 before.

    Raises:
        SetupError: The kernel has objects that were made for one process.
        DistributedError: A worker could not start, or an earlier cell failed on it.
    """
    check_kernel(config, num_ranks, replay=replay, had_workers=had_workers)
    cells = shell.history_manager.input_hist_parsed
    above, rest = split_at(cells[-1], line_of_cell(shell), shell.transform_cell)
    earlier = [*cells[1:-1], above]
    begin_s = time.monotonic()
    with ExitStack() as stack:
        notebook = Notebook(config, num_ranks, shell, stack)
        notebook.replay(earlier)
        session = notebook.open_session(console)
        session.on_close.push(stack.pop_all())
        stack.callback(session.close)
        notebook.begin(rest)
        stack.pop_all()
    session.had_workers = True
    logger.info("ready in %.1f s", time.monotonic() - begin_s)
    return session


class Notebook:
    """The ranks of one kernel, until `disable_multi_gpu` or until a worker dies.

    Args:
        config: The run's options.
        num_ranks: Ranks, including this one.
        shell: `get_ipython()`.
        stack: Resources that are opened here are added to it. The caller closes it.
    """

    def __init__(self, config: MultiGPUConfig, num_ranks: int, shell: Any, stack: ExitStack) -> None:
        from unsloth_multigpu.launch.pulse import last_collective

        self._config = config
        self._generation = 0
        self._identity = _identity(0, num_ranks)
        self.run_dir = stack.enter_context(private_dir())
        self.log_dir = stack.enter_context(exclusive_log_dir(Path(config.log_dir), num_ranks))
        run = write_run(self.run_dir, _JOB, _JOB, num_ranks, self.log_dir)
        values = self._variables_of_ranks(num_ranks)
        before = {name: os.environ.get(name) for name in (*values, *DEVICE_VARIABLES)}
        variables = RankVariables(values, before)
        stack.enter_context(variables.in_effect())
        settings = {"path": sys.path, "before": before, "profile": shell.profile_dir.location}
        workers: list[WorkerProcess] = []
        self.kernel = Kernel(workers, last_collective)
        for rank in range(1, num_ranks):
            own = {**_identity(rank, num_ranks).variables(), ENV_NOTEBOOK: json.dumps(settings)}
            environment = {**os.environ, **own}
            workers.append(WorkerProcess(rank, self.log_dir / f"rank_{rank}.log", environment))
            stack.callback(workers[-1].close)
            stack.callback(workers[-1].end, _END_LIMIT_S)
        stack.enter_context(_shared_threads(num_ranks))
        stack.callback(self._close_group)
        stack.callback(Monitor(self.kernel, self.run_dir, config.hang_timeout_s, self._abort_group).close)
        self._kernel_shell = KernelShell(shell, self.kernel, self.after_cell, variables, run)
        stack.callback(self._kernel_shell.close)
        self.program = KernelProgram(self.kernel, self._kernel_shell.publisher, panel := Panel(run))
        stack.callback(panel.end)
        # At exit the kernel only kills its workers, because its front end waits for its end.
        leave = only_here(self._leave)
        atexit.register(leave)
        stack.callback(atexit.unregister, leave)

    def replay(self, earlier: Sequence[str]) -> None:
        """Runs the earlier cells of this kernel on the workers. There is no process group yet."""
        self.kernel.wait_until_ready(_START_LIMIT_S)
        for execution_count, source in enumerate(earlier, 1):
            if source.strip() and is_python(source):
                self.kernel.replay(source, self._config.timeout_s, execution_count=execution_count)

    def open_session(self, console: Console) -> Session:
        """Opens the process group and the session of rank 0."""
        self._open_group()
        # Read again, because this kernel has become a rank meanwhile.
        context = RunContext.read(os.environ)
        return self.program.open_session(self._config, self._identity, console, context)

    def begin(self, rest: str) -> None:
        """Runs the rest of the current cell on the workers, too."""
        self._kernel_shell.open()
        self._kernel_shell.begin(rest)

    def after_cell(self) -> None:
        """Called between two cells: opens a new process group if the last cell broke the old one.

        Raises:
            DivergenceError: Ranks have different models, so they cannot get rank 0's weights.
            DistributedError: The ranks cannot open a new process group; this kernel is alone now.
        """
        trainings = self.program.trainings
        is_cut = trainings is not None and trainings.is_cut
        shown: MultiGPUError | None = None
        if not self._dead() and (self.kernel.is_broken or is_cut):
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
        self.kernel.wait_until_gone(_END_LIMIT_S)
        error = DistributedError(
            f"The ranks could not open a new process group after the cell ({type(failed).__name__}: {failed}).",
            hint="This kernel continues alone and keeps its model, unless shard='on' has divided it: save it. Restart "
            "the kernel to train on all ranks.",
        )
        error.__cause__ = failed
        return error

    def _open_group(self) -> None:
        """Opens a new process group on all ranks, and broadcasts the weights of rank 0's models."""
        from unsloth_multigpu.group.manager import local_device

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

    def _abort_group(self) -> None:
        from unsloth_multigpu.notebook.group import abort_group

        abort_group(self.kernel.pids)

    def _close_group(self) -> None:
        from unsloth_multigpu.notebook.group import close_group

        self._abort_group()  # NCCL would wait for the other ranks, which exit without closing the group.
        close_group()

    def _leave(self) -> None:
        """Called when the kernel exits: kills the workers."""
        for worker in self.kernel.workers:
            worker.kill()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _variables_of_ranks(self, num_ranks: int) -> dict[str, str]:
        from unsloth_multigpu.launch.launcher import rank_environment

        run_id = uuid.uuid4().hex
        variables = rank_environment(self._config, num_ranks, self.run_dir, self.log_dir, run_id, os.environ)
        return {**variables, **_NCCL, **self._identity.variables()}


def _identity(rank: int, num_ranks: int) -> RankIdentity:
    return RankIdentity(rank, rank, num_ranks, num_ranks, "notebook")


@contextmanager
def _shared_threads(num_ranks: int) -> Iterator[None]:
    """Limits torch to this rank's share of the cores: the kernel was started with threads for all of them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads_of_each(num_ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)
