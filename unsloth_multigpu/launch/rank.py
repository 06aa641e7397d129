"""Sets up a process as a rank: it ends with its supervisor, reports its end, and logs to trackers only on rank 0.

A thread, the pulse, reports that the process is alive, and the number of its last collective.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from unsloth_multigpu.errors import ConfigError, MultiGPUError, SetupError
from unsloth_multigpu.logs import tell
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.event import EventWriter, stack_path
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import is_alive, only_here

_PR_SET_PDEATHSIG = 1
_PULSE_S = 0.5
# After an error Python joins threads and runs exit handlers, which a process group may block forever.
TEARDOWN_LIMIT_S = 3.0
_PACKAGE = str(Path(__file__).parents[1]) + "/"
# An error in this file comes from a Python function that it calls for the user.
_PASSES_ON = _PACKAGE + "launch/question.py"


def enter_rank(identity: RankIdentity, context: RunContext) -> tuple[EventWriter | None, HeartbeatPage]:
    """Prepares this process as a rank. Returns the writer of its events, None under other launchers, and its page.

    Raises:
        SetupError: A rank has started this process; it must not act as that rank.
    """
    _quiet_side_effects(identity)
    has_failed = threading.Event()
    # Threads of a process group may abort the interpreter when it ends.
    atexit.register(only_here(leave_group), has_failed.is_set)
    run_dir = context.run_dir
    if run_dir is None:
        os.environ.update(identity.variables())
        return None, HeartbeatPage(None, identity.rank)
    if identity.local_rank > 0 and not os.environ.get("PYTHONBREAKPOINT"):
        os.environ["PYTHONBREAKPOINT"] = "0"  # Only rank 0 has a terminal.
    assert context.supervisor_pid is not None
    die_with_supervisor(context.supervisor_pid)
    if sys.stderr is not None:  # None if the command was started with stderr closed.
        faulthandler.enable()
    if threading.current_thread() is threading.main_thread():
        # SLURM sends SIGUSR1 to every process of a step; only the supervisor acts on it. Not SIG_IGN, which child
        # processes would inherit.
        signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
        signal.siginterrupt(signal.SIGUSR1, False)
    beat = HeartbeatPage(run_dir, identity.rank)
    start_pulse(beat, run_dir, identity.rank)
    events = EventWriter(run_dir, identity.rank, context.attempt, beat)
    events.write("started", pid=os.getpid())
    _report_end(identity, events, run_dir, has_failed)
    return events, beat


def enter_notebook(identity: RankIdentity, run_dir: str) -> tuple[HeartbeatPage, Callable[[], None]]:
    """Prepares this process as a rank of a notebook. It writes no events, because the kernel receives its results.

    Returns:
        The heartbeat page of the rank, and a function that ends its pulse.
    """
    _quiet_side_effects(identity)
    beat = HeartbeatPage(run_dir, identity.rank)
    return beat, start_pulse(beat, run_dir, identity.rank)


def start_pulse(page: HeartbeatPage, run_dir: str | os.PathLike[str], rank: int) -> Callable[[], None]:
    """Starts the pulse thread, and makes SIGUSR2 write the stacks of all threads into the run's folder.

    Returns:
        A function that ends the thread and unregisters SIGUSR2.
    """
    path = stack_path(run_dir, rank)
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "w")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    stop = threading.Event()

    def beat() -> None:
        page.pulse(last_collective())
        while not stop.wait(_PULSE_S):
            page.pulse(last_collective())

    thread = threading.Thread(target=beat, name="unsloth_multigpu-pulse", daemon=True)

    def end() -> None:
        stop.set()
        thread.join(_PULSE_S)
        faulthandler.unregister(signal.SIGUSR2)
        file.close()

    # A thread that returns from torch after the end of the interpreter aborts the process.
    atexit.register(only_here(end))
    thread.start()
    return end


def last_collective() -> int:
    """Returns the number of the last collective that this rank began in the default group; -1 without one."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return -1
        return int(c10d._get_default_group()._get_sequence_number_for_group())
    except (RuntimeError, AttributeError, ValueError):
        # Raised while a group is opened or closed. The thread must go on: a rank without a pulse counts as hung.
        return -1


def _quiet_side_effects(identity: RankIdentity) -> None:
    if identity.rank > 0:
        # For trackers and windows that the script opens. Hugging Face's callbacks log only on rank 0 anyway.
        os.environ.setdefault("WANDB_MODE", "disabled")
        os.environ.setdefault("MPLBACKEND", "agg")


def leave_group(has_failed: Callable[[], bool]) -> None:
    """Destroys the process group, unless an error ends this process: other ranks may be gone then."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and not has_failed():
        dist.destroy_process_group()


def die_with_supervisor(supervisor_pid: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send a signal to this process when its parent ends. Stays in effect after `exec`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == supervisor_pid:
        return
    # Either the supervisor died before the call above, or a rank has started this process.
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
                # A signal to the supervisor is reported by the supervisor, once for all ranks.
                events.write("interrupted", **facts, exit_code=128 + signal.SIGINT)
                return
            events.write("exception", **facts, exit_code=exit_code)
        except OSError as full:
            tell(f"{facts['traceback']}(not reported to the supervisor: {full})\n")
        else:
            # The supervisor prints the first failure on the terminal, where rank 0 would print it again.
            if identity.rank > 0:
                tell(facts["traceback"])
        # Last, because starting a thread fails without memory.
        timer = threading.Timer(TEARDOWN_LIMIT_S, os._exit, (exit_code,))
        timer.daemon = True
        timer.start()

    def exiting() -> None:
        # Without the folder the supervisor has ended, and nobody reads the event.
        if os.path.isdir(run_dir):
            events.write("exiting")

    sys.excepthook = only_here(report, otherwise=sys.excepthook)
    atexit.register(only_here(exiting))


def shown_error(
    kind: type[BaseException], error: BaseException, tb: TracebackType | None
) -> traceback.TracebackException:
    """Returns the traceback of an error without the frames of this package.

    All frames are kept if this package itself has failed, or if its logger is at DEBUG level.
    """
    # TracebackException works even if the error's own str() raises.
    shown = traceback.TracebackException(kind, error, tb, compact=True)
    if not logging.getLogger("unsloth_multigpu").isEnabledFor(logging.DEBUG):
        _leave_out_own_frames(shown, error)
    return shown


def _leave_out_own_frames(shown: traceback.TracebackException, error: BaseException | None) -> None:
    # `compact` leaves out errors that are not printed, so `shown` may have a shorter chain than `error`.
    for name in ("__cause__", "__context__"):
        if (before := getattr(shown, name)) is not None:
            _leave_out_own_frames(before, getattr(error, name, None))
    frames = list(shown.stack)
    # "<string>" is the generated __init__ of a dataclass.
    is_own = [frame.filename.startswith(_PACKAGE) or frame.filename == "<string>" for frame in frames]
    others = [frame for frame, own in zip(frames, is_own, strict=True) if not own]
    is_defect = bool(is_own) and is_own[-1] and frames[-1].filename != _PASSES_ON
    if others and (not is_defect or isinstance(error, MultiGPUError)):
        shown.stack[:] = others
