"""The pulse of a rank: a thread that reports twice a second that the process lives, and the collective it waits in."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from unsloth_multigpu.accelerator import CPU_BACKEND, KINDS
from unsloth_multigpu.wire.event import stack_path
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.process import only_here

PERIOD_S = 0.5
# Errors while a process group is opened or closed, or with another format of torch's records. The thread must survive
# them, because a rank without a pulse counts as hung.
_NOT_THERE = (RuntimeError, AttributeError, ValueError, LookupError, TypeError)


def start_pulse(
    page: HeartbeatPage, run_dir: str | os.PathLike[str], rank: int, hang_timeout_s: float
) -> Callable[[], None]:
    """Starts the thread, and lets SIGUSR2 write the stacks of all threads into the run's folder.

    `hang_timeout_s` is the supervisor's limit; 0 = collectives are never looked up. A look-up takes up to 0.1 s, so it
    is done only after half of the limit without progress.

    Returns:
        A function that ends the thread and unregisters SIGUSR2.
    """
    path = stack_path(run_dir, rank)
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "w")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    stop = threading.Event()
    pulse = Pulse(page, hang_timeout_s)
    thread = threading.Thread(target=pulse.run, args=(stop,), name="unsloth_multigpu-pulse", daemon=True)

    def end() -> None:
        stop.set()
        thread.join(PERIOD_S)
        faulthandler.unregister(signal.SIGUSR2)
        file.close()

    # A thread that returns from torch after the end of the interpreter aborts the process.
    atexit.register(only_here(end))
    thread.start()
    return end


class Pulse:
    """The work of the thread; see `start_pulse`."""

    def __init__(self, page: HeartbeatPage, hang_timeout_s: float) -> None:
        self._page = page
        self._stall_s = hang_timeout_s / 2 or float("inf")
        self._place: tuple[int, ...] = ()
        self._since_s = time.monotonic()
        self._operation = ""

    def run(self, stop: threading.Event) -> None:
        """Beats until `stop` is set."""
        self.beat()
        while not stop.wait(PERIOD_S):
            self.beat()

    def beat(self) -> None:
        """Writes one pulse. Takes 20 microseconds while the rank makes progress."""
        page, now_s = self._page, time.monotonic()
        place = (last_collective(), page.step, page.phase, page.micro_batch)
        if place != self._place:
            self._place, self._since_s, self._operation = place, now_s, ""
        elif now_s - self._since_s > self._stall_s:
            # Looked up repeatedly: the collective may have ended, and the rank may hang after it.
            self._since_s, self._operation = now_s - self._stall_s / 2, pending_operation()
        page.pulse(place[0], self._operation)


def last_collective() -> int:
    """Returns the number of the last collective that this rank began in the default group; -1 without one."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized():
            return -1
        return int(c10d._get_default_group()._get_sequence_number_for_group())
    except _NOT_THERE:
        return -1


def pending_operation() -> str:
    """Returns the oldest unfinished collective of the default group, such as "all_reduce [8, 4]"; "" without one.

    It is read from torch's flight recorder, which keeps the latest 2000.
    """
    functions: Any = sys.modules.get("torch._C._distributed_c10d")
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        # A backend may have its own recorder, and a group several backends.
        backend = str(c10d.get_backend()) if c10d is not None and c10d.is_initialized() else ""
        names = [kind.backend for kind in KINDS.values()] + ["fr"]
        dumps = {name: getattr(functions, f"_dump_{name}_trace_json", None) for name in names}
        own = dumps.get("fr" if backend == CPU_BACKEND else backend)
        for dump in filter(None, [own] if own else dumps.values()):
            for entry in json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", []):
                is_over = entry["retired"] or entry["state"] == "completed"
                if not is_over and entry["process_group"][0] == "0":
                    sizes = " ".join(map(str, entry["input_sizes"]))
                    return f"{entry['profiling_name'].rpartition(':')[2]} {sizes}".strip()
    except _NOT_THERE:
        pass
    return ""
