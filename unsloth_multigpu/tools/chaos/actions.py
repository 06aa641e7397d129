"""What a planted fault does to its rank: one function per kind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

# The supervisor looks for signals ten times a second, and takes two of them within 0.2 s for one.
_LOOK_S = 0.5
_MEMORY_LEFT_BYTES = 2**26
_MEMORY_ASKED_BYTES = 2**31


def newest_checkpoint(output_dir: str) -> Path | None:
    """The checkpoint of the highest step."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
    return max(found, key=lambda p: int(p.name.rpartition("-")[2]), default=None)


def _tear(output_dir: str) -> None:
    """Cuts the largest file of the newest checkpoint in half, as a crash or a disk may, and ends this process."""
    checkpoint = newest_checkpoint(output_dir)
    assert checkpoint is not None
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    _kill_self(signal.SIGKILL)


def _loop() -> NoReturn:
    """Keeps the main thread busy without an end."""
    while True:
        pass


def _raise() -> NoReturn:
    raise RuntimeError("planted by unsloth-multigpu chaos")


def _tell_supervisor(signal_number: signal.Signals, pid: int | None, *, times: int = 1) -> None:
    assert pid is not None
    for _ in range(times):
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)
        # Wait inside the step, or a short training would end before the supervisor notices the signal.
        time.sleep(_LOOK_S)


def run_out_of_memory(device: torch.device) -> None:
    """Raises what torch raises where a device's memory is not enough."""
    if device.type == "cpu":
        used_bytes = psutil.Process().memory_info().vms
        # The limit is lifted afterwards: reporting the error needs memory.
        with limited(resource.RLIMIT_AS, used_bytes + _MEMORY_LEFT_BYTES):
            torch.empty(_MEMORY_ASKED_BYTES, dtype=torch.uint8)
    else:
        torch.empty(2**50, dtype=torch.uint8, device=device)


def _shut_connections() -> None:
    """Ends this process's connections to other ranks: all but those to the store."""
    store_port = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=int(name))
        except OSError:  # The folder's own, closed by now; a file or a pipe.
            continue
        with suppress(OSError):  # A listening socket has no peer.
            is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and sock.getpeername()[1] != store_port:
                sock.shutdown(socket.SHUT_RDWR)
        sock.detach()  # It belongs to whoever opened it.


def _kill_self(signal_number: signal.Signals) -> None:
    # Another thread may take the signal, and this one would run on for a moment.
    os.kill(os.getpid(), signal_number)
    threading.Event().wait(_LOOK_S)


# Each is given the process id of the supervisor, and the Trainer's output folder.
ACTIONS: dict[str, Callable[[int | None, str], Any]] = {
    "raise": lambda *_: _raise(),
    "exit": lambda *_: sys.exit(0),
    "os_exit": lambda *_: os._exit(0),
    "kill": lambda *_: _kill_self(signal.SIGKILL),
    "segv": lambda *_: _kill_self(signal.SIGSEGV),
    "stop": lambda *_: _kill_self(signal.SIGSTOP),
    "loop": lambda *_: _loop(),
    "cut": lambda *_: _shut_connections(),
    "corrupt": lambda _, output_dir: _tear(output_dir),
    "kill_supervisor": lambda pid, _: _tell_supervisor(signal.SIGKILL, pid),
    "sigterm": lambda pid, _: _tell_supervisor(signal.SIGTERM, pid),
    "sigint": lambda pid, _: _tell_supervisor(signal.SIGINT, pid),
    "sigusr1": lambda pid, _: _tell_supervisor(signal.SIGUSR1, pid),
    "sigint_twice": lambda pid, _: _tell_supervisor(signal.SIGINT, pid, times=2),
}


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    """Lowers a limit of this process, one of `resource.RLIMIT_*`, while it is open."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))
