"""`enable_multi_gpu()` in a notebook: this kernel becomes rank 0, and workers run every later cell with it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import DistributedError, DivergenceError, MultiGPUError, SetupError
from unsloth_multigpu.logs import Console, get_logger
from unsloth_multigpu.notebook.cell import bound_names, replay_sources, split_at
from unsloth_multigpu.notebook.kernel import Kernel
from unsloth_multigpu.notebook.monitor import Monitor
from unsloth_multigpu.notebook.process import Worker
from unsloth_multigpu.notebook.profile import describe_shell
from unsloth_multigpu.notebook.refusal import check_kernel, line_of_cell, note_enabled
from unsloth_multigpu.notebook.shell import KernelShell
from unsloth_multigpu.notebook.variables import DEVICE_VARIABLES, RankVariables
from unsloth_multigpu.options import ENV_NOTEBOOK, ENV_RUN_DIR, MultiGPUConfig
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.folder import exclusive_log_dir, private_dir
from unsloth_multigpu.wire.identity import RankIdentity

if TYPE_CHECKING:
    from unsloth_multigpu.session import Session

logger = get_logger(__name__)

_START_LIMIT_S = 120.0
_END_LIMIT_S = 2.0
# A group that ends by an error must not end the process, which is the kernel (PyTorch's ProcessGroupNCCL).
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def find_shell() -> Any:
    """The IPython shell of this kernel; None outside a notebook, also in IPython at a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if hasattr(shell, "kernel") else None


def open_notebook(config: MultiGPUConfig, num_ranks: int, console: Console, shell: Any, *, replay: bool) -> Session:
    """Makes this kernel rank 0 of `num_ranks`, and the rest of the running cell a cell of all of them.

    Raises:
        SetupError: The kernel holds something that was made for one process.
        DistributedError: A worker could not start, or not do again what the cells before did.
    """
    check_kernel(config, num_ranks, replay=replay)
    line = line_of_cell(shell)
    begin_s = time.monotonic()
    with ExitStack() as stack:
        notebook = Notebook(config, num_ranks, shell, line, stack)
        notebook.replay()
        session = notebook.open_session(console)
        session.on_close.push(stack.pop_all())
        stack.callback(session.close)
        notebook.begin_rest_of_cell()
        stack.pop_all()
    note_enabled()
    logger.info("ranks=%d logs=%s seconds=%.1f", num_ranks, notebook.log_dir, time.monotonic() - begin_s)
    return session


class Notebook:
    """The ranks of one kernel, from `enable_multi_gpu` to `disable_multi_gpu` or to the death of a worker.

    Args:
        config: The run's options.
        num_ranks: Ranks, with this one.
        shell: `get_ipython()`.
        stack: Closed at the end; what is opened here goes there.
    """

    def __init__(self, config: MultiGPUConfig, num_ranks: int, shell: Any, line: int, stack: ExitStack) -> None:
        from unsloth_multigpu.launch.pulse import last_collective
        from unsloth_multigpu.wire.control import ControlPage

        self._config = config
        self._shell = shell
        self._line = line
        self._generation = 0
        self._pid = os.getpid()
        self._identity = _identity(0, num_ranks)
        self.run_dir = stack.enter_context(private_dir())
        self.log_dir = stack.enter_context(exclusive_log_dir(Path(config.log_dir), num_ranks))
        # Nobody asks the ranks by it to stop: Stop ends a cell.
        stack.callback(ControlPage(self.run_dir, num_ranks).close)
        values = self._variables_of_ranks(num_ranks)
        before = {name: os.environ.get(name) for name in (*values, *DEVICE_VARIABLES)}
        variables = RankVariables(values, before)
        stack.enter_context(variables.in_effect())
        cells = shell.history_manager.input_hist_parsed
        told = {"path": sys.path, "before": before, "shell": describe_shell(shell, bound_names(cells))}
        workers: list[Worker] = []
        self.kernel = Kernel(workers, last_collective)
        for rank in range(1, num_ranks):
            own = {**_identity(rank, num_ranks).variables(), ENV_NOTEBOOK: json.dumps(told)}
            environment = {**os.environ, **own}
            workers.append(Worker(rank, self.log_dir / f"rank_{rank}.log", environment))
            stack.callback(workers[-1].close)
            stack.callback(workers[-1].end, _END_LIMIT_S)
        stack.enter_context(_shared_threads(num_ranks))
        stack.callback(self._close_group)
        stack.callback(Monitor(self.kernel, self.run_dir, config.hang_timeout_s, self._abort_group).close)
        self._kernel_shell = KernelShell(shell, self.kernel, self.after_cell, variables, self.run_dir)
        stack.callback(self._kernel_shell.close)
        # A kernel that ends closes nothing: its front end would wait for the ranks.
        atexit.register(self._leave)
        stack.callback(atexit.unregister, self._leave)

    def replay(self) -> None:
        """Lets the workers do what this kernel did before the line. Without a group: rank 0 would not be there."""
        self.kernel.wait_until_ready(_START_LIMIT_S)
        for worker in self.kernel.workers:
            for failure in worker.start_failures:
                # In a kernel it stops nothing either, and may have failed there as well.
                logger.warning("before the first cell rank %d failed in: %s (see %s)", worker.rank, failure, worker.log)
        cells = self._shell.history_manager.input_hist_parsed
        before, self._rest = split_at(cells[-1], self._line, self._shell.transform_cell)
        for number, source in enumerate(replay_sources([*cells[1:-1], before], self._shell.user_ns), 1):
            if source.strip():
                self.kernel.replay(source, self._config.timeout_s, execution_count=number)

    def open_session(self, console: Console) -> Session:
        """Opens the group and the session of rank 0."""
        from unsloth_multigpu.session import open_session

        self._open_group()
        session = open_session(self._config, self._identity, console, RunContext.read(os.environ))
        session.before_training = self._check_place
        session.is_apart = lambda: self._kernel_shell.is_apart
        return session

    def begin_rest_of_cell(self) -> None:
        """From the line on, this cell runs on all ranks."""
        self._kernel_shell.open()
        self._kernel_shell.begin(self._rest)

    def after_cell(self, error: BaseException | None) -> None:
        """Between two cells: makes good what the last one broke.

        Args:
            error: What the cell has failed by.

        Raises:
            DivergenceError: Ranks have different trainers, which cannot be made equal.
            DistributedError: The ranks do not come together again; this kernel is alone now.
        """
        from unsloth_multigpu import plugin

        session = plugin.active_session()
        trainings = None if session is None else session.trainings
        # A mistake outside a training, made on all ranks alike, breaks nothing; to send a large model takes its time.
        is_doubtful = bool(error is not None and trainings and (trainings.is_cut or not self.kernel.is_common))
        told: MultiGPUError | None = None
        if not self._dead() and (self.kernel.is_broken or is_doubtful):
            try:
                self._open_group()
            except DivergenceError as divergence:
                told = divergence  # The group is there.
            except (RuntimeError, OSError, MultiGPUError, KeyboardInterrupt) as failed:
                told = self._give_up(failed)
        if self._dead():
            logger.warning("this kernel goes on alone: %s", self._dead()[0].describe_end())
            plugin.disable_multi_gpu()
        if told is not None:
            raise told

    def _dead(self) -> list[Worker]:
        return [worker for worker in self.kernel.workers if worker.exit_code is not None]

    def _give_up(self, failed: BaseException) -> DistributedError:
        for worker in self.kernel.workers:
            worker.kill("the ranks could not be brought together again")
        self.kernel.wait_until_gone(_END_LIMIT_S)
        error = DistributedError(
            f"The ranks could not be brought together again after the cell ({type(failed).__name__}: {failed}).",
            hint="This kernel goes on alone and keeps its model: save it. Restart the kernel to train on all ranks.",
        )
        error.__cause__ = failed
        return error

    def _open_group(self) -> None:
        """Makes a new group on all ranks, the old one being of no use, and makes their trainers equal."""
        from unsloth_multigpu import plugin
        from unsloth_multigpu.group.manager import default_backend, local_device

        config, session = self._config, plugin.active_session()
        self._generation += 1
        order = {
            "generation": self._generation,
            "backend": config.ddp_backend or default_backend(local_device(self._identity, config).type),
            "timeout_s": config.timeout_s,
            "pids": self.kernel.pids,
            # Rank 0's view decides for all.
            "heals": session is not None and bool(session.trainings),
            "num_trainings": 0 if session is None else session.num_trainings,
        }
        self.kernel.begin_healing(order)
        try:
            join_group(order)
        except BaseException as error:
            told = self.kernel.finish(error)
            if told is None:
                raise
            raise told from error
        if (told := self.kernel.finish(None)) is not None:
            raise told

    def _abort_group(self) -> None:
        from unsloth_multigpu.notebook.group import abort_group

        abort_group(self.kernel.pids)

    def _close_group(self) -> None:
        from unsloth_multigpu.notebook.group import close_group

        self._abort_group()  # NCCL would wait for the others, which end without closing theirs.
        close_group()

    def _leave(self) -> None:
        """The kernel ends."""
        if os.getpid() == self._pid:
            for worker in self.kernel.workers:
                worker.kill()
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def _check_place(self) -> None:
        """The other ranks take part in a training only where it is in a cell."""
        if self.kernel.current is None:
            raise SetupError(
                "train() was called outside a cell of all ranks: from a thread, a subshell or a widget's callback.",
                hint="Call it in a cell.",
            )

    def _variables_of_ranks(self, num_ranks: int) -> dict[str, str]:
        from unsloth_multigpu.launch.launcher import rank_environment

        run_id = uuid.uuid4().hex
        variables = rank_environment(self._config, num_ranks, self.run_dir, self.log_dir, run_id, os.environ)
        return {**variables, **_NCCL, **self._identity.variables()}


def _identity(rank: int, num_ranks: int) -> RankIdentity:
    return RankIdentity(rank, rank, num_ranks, num_ranks, "notebook")


def wait_for_kernel_at_close(session: Session) -> None:
    """Lets a worker's `disable_multi_gpu()` wait for rank 0's, which ends this process: it runs nothing alone."""
    shell = sys.modules["IPython"].get_ipython()
    session.has_rank_0_left = shell.has_rank_0_left
    session.is_apart = shell.is_apart
    session.on_close.callback(shell.value_of_rank_0, "disable_multi_gpu()")


def join_group(order: Mapping[str, Any]) -> None:
    """Every rank's part of `Notebook._open_group`. Collective.

    Args:
        order: What `Notebook._open_group` sends.
    """
    from unsloth_multigpu import plugin
    from unsloth_multigpu.notebook.group import abort_group, close_group, open_group

    session = plugin.active_session()
    if session is not None:  # None at first: the cell that follows calls the line.
        session.leave_group()
    abort_group(order["pids"])  # Collectives that nobody has waited for would keep it from ending.
    close_group()
    open_group(Path(os.environ[ENV_RUN_DIR]), order["generation"], order["backend"], order["timeout_s"])
    if session is not None:
        session.enter_group(order["num_trainings"], heals=order["heals"])


@contextmanager
def _shared_threads(num_ranks: int) -> Iterator[None]:
    """This process was started with threads for all cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)
