"""What a planted fault does to its rank: one function per kind."""

from __future__ import annotations

import functools
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


def damage(checkpoint: Path, file: str, how: str) -> None:
    """Damages one file of a checkpoint as a crash or a disk may: half of it, nothing, not there, one bit changed."""
    files = [p for p in checkpoint.rglob("*") if p.is_file()]
    path = checkpoint / file if file else max(files, key=lambda p: p.stat().st_size)
    size = path.stat().st_size
    if how == "missing":
        path.unlink()
    elif how == "flip":
        with path.open("r+b") as opened:
            opened.seek(size // 2)
            byte = opened.read(1)
            opened.seek(size // 2)
            opened.write(bytes([(byte or b"\0")[0] ^ 1]))
    else:
        os.truncate(path, size // 2 if how == "cut" else 0)


def loop() -> NoReturn:
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


def _shut_connections(*, of_store: bool) -> None:
    """Ends this process's connections to the store, or all others: those of the process group."""
    store_port = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # The folder's own, closed by now.
            continue
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError:  # A file or a pipe.
            os.close(descriptor)
            continue
        with sock, suppress(OSError):  # A listening socket has no peer.
            is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and (sock.getpeername()[1] == store_port) == of_store:
                sock.shutdown(socket.SHUT_RDWR)


def _kill_self(signal_number: signal.Signals) -> None:
    # Another thread may take the signal, and this one would run on for a moment.
    os.kill(os.getpid(), signal_number)
    threading.Event().wait(_LOOK_S)


# Each is given the process id of the supervisor.
ACTIONS: dict[str, Callable[[int | None], Any]] = {
    "raise": lambda _: _raise(),
    "exit": lambda _: sys.exit(0),
    "os_exit": lambda _: os._exit(0),
    "kill": lambda _: _kill_self(signal.SIGKILL),
    "segv": lambda _: _kill_self(signal.SIGSEGV),
    "stop": lambda _: _kill_self(signal.SIGSTOP),
    "corrupt": lambda _: _kill_self(signal.SIGKILL),
    "kill_supervisor": functools.partial(_tell_supervisor, signal.SIGKILL),
    "sigterm": functools.partial(_tell_supervisor, signal.SIGTERM),
    "sigint": functools.partial(_tell_supervisor, signal.SIGINT),
    "sigusr1": functools.partial(_tell_supervisor, signal.SIGUSR1),
    "sigint_twice": functools.partial(_tell_supervisor, signal.SIGINT, times=2),
    "cut": lambda _: _shut_connections(of_store=False),
    "store": lambda _: _shut_connections(of_store=True),
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
