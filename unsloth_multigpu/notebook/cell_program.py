"""The program of a notebook's rank: cells, which can fail, be stopped, and be run again.

`unsloth_multigpu.program` has the base class for scripts, with the purpose of each method.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.group.manager import DDPManager, local_device
from unsloth_multigpu.launch.rank import enter_notebook
from unsloth_multigpu.notebook import recovery
from unsloth_multigpu.notebook.display import Panel
from unsloth_multigpu.notebook.kernel import Kernel
from unsloth_multigpu.notebook.kernel_share import Publisher, Receiver
from unsloth_multigpu.program import Program
from unsloth_multigpu.session import Session
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.wire.context import RunContext


class ReplayedLineError(SetupError, ConfigError):
    """Raised on a worker by `enable_multi_gpu()` in a replayed cell, where rank 0's call failed or was stopped."""


class CellProgram(Program):
    """The cells that a rank of a notebook runs.

    It outlives the process group of its session: after a failed cell, `join_group` opens a new one. `sharer` tells
    whether the other ranks run the same code as this rank.
    """

    def __init__(self, sharer: Publisher | Receiver) -> None:
        super().__init__()
        self._sharer = sharer
        self._session: Session | None = None
        self._trainings: recovery.Trainings | None = None
        self._num_finished = 0

    @property
    def session(self) -> Session | None:
        """The session of this process, while it is open."""
        return None if self._session is None or self._session.is_closed else self._session

    @property
    def trainings(self) -> recovery.Trainings | None:
        """The Trainers of this session; None without an open session."""
        return None if self.session is None else self._trainings

    def enter(self, session: Session) -> None:
        """Sets up this process as a rank."""
        self._session, config = session, session.config
        # The index must be equal on all ranks, but some may have counted a call of enable_multi_gpu() that failed.
        session.index = 0
        self._trainings = recovery.Trainings()
        session.on_close.callback(recovery.become_one_process)
        session.on_close.callback(self._trainings.retire)
        session.on_close.callback(recovery.lose_all)
        assert session.context.run_dir is not None
        session.beat, end_pulse = enter_notebook(session.identity, session.context.run_dir)
        session.on_close.callback(end_pulse)
        session.beat.note(device=str(local_device(session.identity, config)))

    def prepare(self, manager: DDPManager) -> None:
        """Makes the manager use the store of the process group. Each new group has a new, empty store."""
        manager.connect_store = dist.distributed_c10d._get_default_store
        manager.is_abandoned = lambda: self._sharer.is_abandoned

    def can_exchange(self) -> bool:
        """False in a cell that not all ranks run, and while there is no process group."""
        return not self._sharer.is_apart and dist.is_initialized()

    def begin_training(self) -> int:
        """Returns how many trainings have finished: an interrupted one keeps its number when its cell is run again."""
        self._num_begun += 1
        return self._num_finished

    def end_training(self) -> None:
        """Counts a successful training."""
        self._num_finished += 1

    def note_training(self, loop: Loop) -> None:
        """Records a Trainer of this process group."""
        if self._trainings is not None:
            self._trainings.note(self._num_begun - 1, loop)

    def order(self) -> dict[str, Any]:
        """Returns rank 0's fields of the order to open a new group. All ranks take over its counts of trainings."""
        counts = (0, 0) if self.session is None else (self._num_begun, self._num_finished)
        return {"sends_weights": bool(self.trainings), "num_trainings": counts}

    def join_group(self, order: Mapping[str, Any]) -> None:
        """Opens a new process group. Trainers cannot train again; their models get rank 0's weights. Collective.

        `order` is the message of `Notebook._open_group`. Raises DivergenceError if a model has different tensors on the
        ranks; the group is open then.
        """
        # None at first: a worker calls enable_multi_gpu() only in the cell that follows.
        session, trainings = self.session, self.trainings
        if trainings is not None:
            trainings.retire()
        # Destroying the old group would wait for pending collectives.
        recovery.abort_group(order["pids"])
        recovery.close_group()
        run_dir = RunContext.read(os.environ).run_dir
        assert run_dir is not None
        recovery.open_group(Path(run_dir), order["generation"], order["backend"], order["timeout_s"])
        if session is None or trainings is None:
            return
        recovery.rejoin()
        session.renew_manager()
        self._num_begun, self._num_finished = order["num_trainings"]
        if order["sends_weights"]:
            trainings.send_weights(session.manager(), is_broken=order["is_broken"])


class KernelProgram(CellProgram):
    """The program of rank 0. `kernel` has the current cell, and `panel` shows the ranks during a training."""

    def __init__(self, kernel: Kernel, publisher: Publisher, panel: Panel) -> None:
        super().__init__(publisher)
        self._kernel = kernel
        self._panel = panel

    def begin_training(self) -> int:
        """Also refuses a training outside a cell: the other ranks would not take part. Shows the panel."""
        cell, kernel = self._kernel.current, self._kernel
        if cell is None:
            raise SetupError(
                "train() was called outside a cell of all ranks: from a thread, a subshell or a widget's callback.",
                hint="Call it in a cell.",
            )
        self._panel.begin(lambda: kernel.cell is cell)
        return super().begin_training()

    def end_training(self) -> None:
        """Also shows the last figures in the table."""
        super().end_training()
        self._panel.end()


class WorkerProgram(CellProgram):
    """The program of a rank above 0.

    `receiver` tells which cell runs, and whether rank 0 runs it now. `options` are those of rank 0's call.

    Attributes:
        await_rank_0: Set by the worker. Waits until rank 0 runs the rest of the cell; None = rank 0's call failed.
    """

    def __init__(self, receiver: Receiver, options: Mapping[str, Any]) -> None:
        super().__init__(receiver)
        self._receiver = receiver
        self._options = options
        self.await_rank_0: Callable[[], None] | None = None

    def meet_at_line(self) -> None:
        """Called by `enable_multi_gpu()`. In a replayed cell it waits for rank 0, or raises if rank 0's call failed."""
        if not self._receiver.is_replay:
            return
        if self.await_rank_0 is None:
            raise ReplayedLineError("This call was repeated in a later cell.", hint="Continue there.")
        self.await_rank_0()

    def enter(self, session: Session) -> None:
        """Also makes `disable_multi_gpu()` wait for rank 0's call of it, which ends this process."""
        if session.config.of_the_run() != self._options:  # Rank 0's call with these failed earlier in this cell.
            raise ReplayedLineError("Rank 0 called it with other options.", hint="Call it alike on all ranks.")
        super().enter(session)
        session.on_close.callback(self._receiver.wait_for, "disable_multi_gpu()")
