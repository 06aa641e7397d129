"""What a rank runs, and how its session depends on that. Here: a script. Cells are in `notebook.cell_program`."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.wire.process import only_here

if TYPE_CHECKING:
    from torch import nn

    from unsloth_multigpu.group.manager import DDPManager
    from unsloth_multigpu.notebook.cell_program import WorkerProgram
    from unsloth_multigpu.session import Session
    from unsloth_multigpu.train.loop import Loop

logger = get_logger(__name__)


def find_shell() -> Any:
    """The IPython shell of this kernel; None outside a notebook, also in IPython at a terminal. Imports nothing."""
    shell = _ipython_shell()
    return shell if hasattr(shell, "kernel") else None


def find_worker_program() -> WorkerProgram | None:
    """What a notebook's worker runs; None in any other process. Imports nothing."""
    program: WorkerProgram | None = getattr(_ipython_shell(), "multi_gpu_program", None)
    return program


def _ipython_shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


class Program:
    """A script. It runs once from its first line to its last, and whoever started the process judges its end."""

    def __init__(self) -> None:
        self._num_begun = 0

    def enter(self, session: Session) -> None:
        """Makes this process a rank, where a launcher has started it as one. The session has no patches yet."""
        identity, config = session.identity, session.config
        if identity.launcher == "none":
            return
        from unsloth_multigpu.launch.rank import enter_rank

        # Called after what `enter_rank` registers, which ends the process group: a rank that waits there goes on then.
        atexit.register(only_here(session.leave))
        session.events, session.beat = enter_rank(identity, session.context, config.hang_timeout_s)
        _draw_alike(session)
        if identity.world_size > 1:
            session.on_close.enter_context(launchers_refused(self._has_begun))
        if identity.rank == 0 and identity.world_size > 1 and not session.tool.is_comparison:
            session.on_close.callback(warn_of_lone_steps().remove)

    def prepare(self, manager: DDPManager) -> None:
        """Tells a new manager how this rank meets the others. In a script it finds them by itself."""

    def can_exchange(self) -> bool:
        """False where the other ranks do not run what this rank runs now, or cannot be reached."""
        return True

    def _has_begun(self) -> bool:
        """True once the ranks have opened a group: they train, or have trained, together."""
        dist = sys.modules.get("torch.distributed")
        return bool(self._num_begun or (dist and dist.is_initialized()))

    def begin_training(self) -> int:
        """Counts a call of `train()`.

        Returns:
            Which training it is, counted from 0: the same number for the same training when the code is run again.

        Raises:
            SetupError: A training cannot begin here.
        """
        self._num_begun += 1
        return self._num_begun - 1

    def end_training(self) -> None:
        """The call of `train()` has returned."""

    def note_training(self, loop: Loop) -> None:
        """All ranks are about to train the Trainer that this loop steers."""

    def note_wrapper(self, model: nn.Module) -> None:
        """A loop without a Trainer is about to train this wrapper."""


def warn_of_lone_steps() -> Any:
    """Says so if an optimizer makes its first step before there is a process group: each rank trains by itself.

    Returns:
        The handle of torch's hook; `remove()` ends the watch.
    """
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(*_: Any) -> None:
        handle.remove()
        if not dist.is_initialized():
            logger.warning(
                "an optimizer makes a step, and there is no process group: every rank trains by itself and nothing is "
                "shared. Use a Trainer, or wrap_model_multi_gpu"
            )

    handle = register_optimizer_step_pre_hook(look)
    return handle


@contextmanager
def launchers_refused(has_begun: Callable[[], bool]) -> Iterator[None]:
    """This rank starts no launcher by `subprocess` or `os.system`, as `refuse_launcher` says, before `has_begun()`."""

    def steer(owner: Any, name: str, place: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def begin(*args: Any, **keywords: Any) -> Any:
            if not has_begun():
                from unsloth_multigpu.launch.child_launcher import refuse_launcher

                refuse_launcher(args[place] if len(args) > place else keywords.get("args"), keywords.get("env"))
            return original(*args, **keywords)

        stack.enter_context(instance_attribute(owner, name, begin))

    with ExitStack() as stack:
        steer(subprocess.Popen, "__init__", 1)
        steer(os, "system", 0)
        yield


def _draw_alike(session: Session) -> None:
    """Makes random numbers that the script draws without a seed equal on all ranks. A seed that it has set stays."""
    if session.index:
        return  # The ranks were made alike when this process enabled the first time.
    if session.identity.world_size > 1:
        import torch  # noqa: F401  # Its generator counts too, and a rank of several needs it anyway.
    if session.context.seed is not None:
        from unsloth_multigpu.launch.seeding import seed_unseeded

        seed_unseeded(session.context.seed, session.context.draws)
    elif session.identity.world_size > 1:
        session.manager().agree_on_draws()
