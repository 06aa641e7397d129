"""What a process does first when it is a rank: end with its supervisor, report its end, be quiet except on rank 0."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from unsloth_multigpu.errors import ConfigError, MultiGPUError, SetupError
from unsloth_multigpu.launch.failure import TEARDOWN_LIMIT_S, await_others, shown_error
from unsloth_multigpu.launch.pulse import start_pulse
from unsloth_multigpu.logs import tell
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.event import EventWriter
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import is_alive, only_here

_PR_SET_PDEATHSIG = 1


def enter_rank(
    identity: RankIdentity, context: RunContext, hang_timeout_s: float = 120.0
) -> tuple[EventWriter | None, HeartbeatPage]:
    """Prepares this process as a rank.

    Args:
        context: What its supervisor tells it.
        hang_timeout_s: The supervisor's limit for a rank that makes no progress.

    Returns:
        Where the rank's events go, or None if another launcher started it, which then reports its end; and the page on
        which the rank writes its progress.

    Raises:
        SetupError: A rank started this process itself; it must not act as that rank.
    """
    _quiet_side_effects(identity)
    has_failed = threading.Event()
    leave_group_at_exit(has_failed.is_set)
    run_dir = context.run_dir
    if run_dir is None:
        os.environ.update(identity.variables())
        return None, HeartbeatPage(None, identity.rank)
    if identity.local_rank > 0 and not os.environ.get("PYTHONBREAKPOINT"):
        os.environ["PYTHONBREAKPOINT"] = "0"  # Only rank 0 has a prompt that the user sees.
    assert context.supervisor_pid is not None
    die_with_supervisor(context.supervisor_pid)
    if sys.stderr is not None:  # None if the command was started with stderr closed.
        faulthandler.enable()
    if threading.current_thread() is threading.main_thread():
        # SLURM sends it to every process of a step; the supervisor alone decides what it means. Not SIG_IGN, which
        # programs that a rank starts would inherit.
        signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
        signal.siginterrupt(signal.SIGUSR1, False)
    beat = HeartbeatPage(run_dir, identity.rank)
    start_pulse(beat, run_dir, identity.rank, hang_timeout_s)
    events = EventWriter(run_dir, identity.rank, context.attempt, beat)
    events.write("started", pid=os.getpid())
    _report_end(identity, events, run_dir, has_failed)
    return events, beat


def enter_notebook(
    identity: RankIdentity, run_dir: str, hang_timeout_s: float
) -> tuple[HeartbeatPage, Callable[[], None]]:
    """Prepares this process as a rank of a notebook, whose kernel itself sees how a cell ends.

    Args:
        run_dir: The private folder of the notebook's ranks.
        hang_timeout_s: The kernel's limit for a rank that makes no progress.

    Returns:
        The page on which the rank writes its progress, and a function that ends its pulse.
    """
    _quiet_side_effects(identity)
    beat = HeartbeatPage(run_dir, identity.rank)
    return beat, start_pulse(beat, run_dir, identity.rank, hang_timeout_s)


def _quiet_side_effects(identity: RankIdentity) -> None:
    if identity.rank > 0:
        # Trackers and windows that the script itself opens; Hugging Face's callbacks are guarded already.
        os.environ.setdefault("WANDB_MODE", "disabled")
        os.environ.setdefault("MPLBACKEND", "agg")


def leave_group_at_exit(has_failed: Callable[[], bool]) -> None:
    """Ends the group's threads when the process exits. If they run until the interpreter ends, they may abort it.

    Args:
        has_failed: Asked at exit: has an error ended this process? Then other ranks may not be there to take part.
    """
    atexit.register(only_here(leave_group), has_failed)


def leave_group(has_failed: Callable[[], bool]) -> None:
    """What `leave_group_at_exit` does at exit."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and not has_failed():
        dist.destroy_process_group()


def die_with_supervisor(supervisor_pid: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Lets the system send this process a signal when the one that started it ends. It holds behind an `exec` too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == supervisor_pid:
        return
    # Either the supervisor died before the line above took effect, or a rank started this process.
    if not is_alive(supervisor_pid):
        os._exit(128 + signal.SIGKILL)
    raise SetupError(
        "enable_multi_gpu() was called in a process that a rank started, with that rank's environment.",
        hint="Start such a process without RANK, LOCAL_RANK and WORLD_SIZE in its environment.",
    )


def _report_end(identity: RankIdentity, events: EventWriter, run_dir: str, has_failed: threading.Event) -> None:
    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        has_failed.set()
        shown = shown_error(kind, error, tb)
        facts: dict[str, Any] = {"error": f"{kind.__name__}: {shown}", "traceback": "".join(shown.format())}
        exit_code = error.exit_code if isinstance(error, MultiGPUError) else 1
        if isinstance(error, ConfigError) and error.most_ranks:
            facts["most_ranks"] = error.most_ranks
        try:
            if issubclass(kind, KeyboardInterrupt):
                # A signal that was sent to the supervisor is reported by the supervisor, once for all ranks.
                events.write("interrupted", **facts, exit_code=128 + signal.SIGINT)
                return
            events.write("exception", **facts, exit_code=exit_code)
            # Later, the others wait in a collective for this rank, and end by that.
            if events.step < 1:
                await_others(run_dir, events.attempt, identity.local_world_size, ("exception", "exiting"))
        except OSError as full:
            tell(f"{facts['traceback']}(not reported to the supervisor: {full})\n")
        else:
            # The supervisor prints the first failure on the terminal. Rank 0 would print it there a second time.
            if identity.rank > 0:
                tell(facts["traceback"])
        # Last, because no thread can be started when memory is used up.
        timer = threading.Timer(TEARDOWN_LIMIT_S, os._exit, (exit_code,))
        timer.daemon = True
        timer.start()

    def exiting() -> None:
        # The folder is deleted when the supervisor has ended. The event has no reader then.
        if os.path.isdir(run_dir):
            events.write("exiting")

    sys.excepthook = only_here(report, otherwise=sys.excepthook)
    atexit.register(only_here(exiting))
