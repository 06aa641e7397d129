"""The pulse of a rank: a thread that reports twice a second that the process lives, and its last collective."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from unsloth_multigpu.wire.event import stack_path
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.process import only_here

PERIOD_S = 0.5


def start_pulse(page: HeartbeatPage, run_dir: str | os.PathLike[str], rank: int) -> Callable[[], None]:
    """Starts the thread, and lets SIGUSR2 write the stacks of all threads into the run's folder.

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
        while not stop.wait(PERIOD_S):
            page.pulse(last_collective())

    thread = threading.Thread(target=beat, name="unsloth_multigpu-pulse", daemon=True)

    def end() -> None:
        stop.set()
        thread.join(PERIOD_S)
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
        # While a group is opened or closed. The thread must survive it: a rank without a pulse counts as hung.
        return -1
