"""The program of a rank: a script. `notebook.cell_program` has its subclass for the cells of a notebook."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.process import only_here

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager
    from unsloth_multigpu.notebook.cell_program import WorkerProgram
    from unsloth_multigpu.session import Session
    from unsloth_multigpu.train.loop import Loop

logger = get_logger(__name__)


def find_shell() -> Any:
    """Returns the IPython shell of a notebook kernel; None elsewhere and in IPython at a terminal. Imports nothing."""
    shell = ipython_shell()
    return shell if hasattr(shell, "kernel") else None


def find_worker_program() -> WorkerProgram | None:
    """Returns the program of a notebook's worker; None elsewhere. Imports nothing."""
    program: WorkerProgram | None = getattr(ipython_shell(), "multi_gpu_program", None)
    return program


def ipython_shell() -> Any:
    """Returns the IPython shell of a notebook or terminal; None elsewhere. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


class Program:
    """A script: it runs once, and its launcher acts on its exit code."""

    def __init__(self) -> None:
        self._num_begun = 0

    def enter(self, session: Session) -> None:
        """Sets up this process as a rank if a launcher has started it as one. Called before patches are applied."""
        identity = session.identity
        if identity.launcher == "none":
            return
        from unsloth_multigpu.launch.rank import enter_rank

        # Exit handlers run in reverse order: first that of `enter_rank`, which destroys the process group, then this.
        atexit.register(only_here(session.leave))
        session.events, session.beat = enter_rank(identity, session.context)
        _seed_ranks_equally(session)
        if identity.world_size > 1:
            from unsloth_multigpu.launch.child_launcher import launchers_refused

            _share_questions(session)
            session.on_close.enter_context(launchers_refused(self._has_begun))
        if identity.rank == 0 and identity.world_size > 1 and not session.tool.is_comparison:
            session.on_close.callback(warn_of_unwrapped_steps().remove)

    def prepare(self, manager: DDPManager) -> None:
        """Configures a new manager. In a script its defaults are right."""

    def can_exchange(self) -> bool:
        """False while the other ranks do not run the same code as this rank, or cannot be reached."""
        return True

    def _has_begun(self) -> bool:
        dist = sys.modules.get("torch.distributed")
        return bool(self._num_begun or (dist and dist.is_initialized()))

    def begin_training(self) -> int:
        """Counts a call of `train()`. Returns its number, from 0, which is the same when the program is run again.

        Raises:
            SetupError: A training cannot begin here.
        """
        self._num_begun += 1
        return self._num_begun - 1

    def end_training(self) -> None:
        """Called after `train()` has returned."""

    def note_training(self, loop: Loop) -> None:
        """Called before all ranks train the Trainer of `loop`."""


def warn_of_unwrapped_steps() -> Any:
    """Warns if the first optimizer step comes before there is a process group. Returns torch's handle of the hook."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(*_: Any) -> None:
        handle.remove()
        if not dist.is_initialized():
            logger.warning(
                "an optimizer steps without a process group: every rank trains by itself, and gradients are not "
                "synchronized. Use a Trainer, or wrap_model_multi_gpu"
            )

    handle = register_optimizer_step_pre_hook(look)
    return handle


def _share_questions(session: Session) -> None:
    """Lets only rank 0 ask on the terminal, if our launcher has started all ranks on this machine."""
    from unsloth_multigpu.launch.question import questions_shared

    identity, context = session.identity, session.context
    if context.run_dir is not None and identity.world_size == identity.local_world_size:
        run_dir = Path(context.run_dir)
        session.on_close.enter_context(questions_shared(run_dir, identity, context.attempt, session.beat))


def _seed_ranks_equally(session: Session) -> None:
    """Makes the random generators equal on all ranks. Those that the script has seeded do not change."""
    if session.index:
        return  # The first session of this process did it.
    if session.context.run_dir is not None:
        from unsloth_multigpu.group.random_state import RANDOM_STATE_FILE, write_seeded_state

        write_seeded_state(Path(session.context.run_dir, RANDOM_STATE_FILE).read_text(encoding="utf-8"))
    elif session.identity.world_size > 1:
        session.manager().agree_on_random_state()
