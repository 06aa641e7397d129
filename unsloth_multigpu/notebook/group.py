"""Opens, closes and aborts the process group of a notebook's ranks. They get a new one after a failed cell.

Imported inside functions only.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store

from unsloth_multigpu.accelerator import KINDS, kind_of
from unsloth_multigpu.group.board import Board

# All ranks open the group at the same time, so this limit is long enough.
_OPEN_LIMIT_S = 60.0

Address = tuple[str, int]


def open_group(run_dir: Path, generation: int, backend: str, timeout_s: float) -> None:
    """Opens the default process group of this generation, a number that grows by one with each group. Collective.

    The store is a file in the run's private folder: no port is open, and no other user can join. `timeout_s` limits one
    collective.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind_of(backend) is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    path = run_dir / f"store_{generation}"
    # Created here, because the store's own file would be readable by others.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    store = FileStore(str(path), world_size)
    Board(rank, store).meet(world_size, timeout_s=min(timeout_s, _OPEN_LIMIT_S), hint="Restart the kernel.")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    dist.barrier()


def store_of_group() -> Store:
    """Returns the store of the default process group. A new group has an empty store."""
    return dist.distributed_c10d._get_default_store()


def close_group() -> None:
    """Destroys the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_group(pids: Sequence[int]) -> None:
    """Makes a collective in which another thread waits raise an error. The group is not usable afterwards.

    gloo's `abort()` does not end a wait (torch 2.13). Shutting down the connections between the ranks, `pids`, does.
    Listening sockets are left alone: shutting one down ends the process.
    """
    if not dist.is_initialized():
        return
    _abort_backends()
    theirs = {(there, here) for pid in pids if pid != os.getpid() for _, here, there in _connections(pid)}
    for descriptor, here, there in _connections(os.getpid()):
        if (here, there) in theirs:
            _shut_down(descriptor, here, there)


def _shut_down(descriptor: int, here: Address, there: Address) -> None:
    """Shuts down one connection, unless gloo has closed it: its descriptor may have been reused by then."""
    try:
        own = os.dup(descriptor)
    except OSError:
        return
    try:
        end = socket.socket(fileno=own)
    except OSError:  # It is not a socket any more.
        os.close(own)
        return
    with end, suppress(OSError):  # The other side may have closed it first.
        if (_address(end.getsockname()), _address(end.getpeername())) == (here, there):
            end.shutdown(socket.SHUT_RDWR)


def _abort_backends() -> None:
    """Aborts the backends of accelerators together: one by one they can wait for each other (pytorch#119797)."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    backends = []
    for group, (name, _) in list(c10d._world.pg_map.items()):
        kinds = [kind for kind, of in KINDS.items() if of.backend in name]
        backends += [group._get_backend(torch.device(kind)) for kind in kinds[:1]]
    grouped = [backend for backend in backends[:1] if hasattr(backend, "_group_start")]
    for backend in grouped:
        backend._group_start()
    for backend in backends:
        backend.abort()
    for backend in grouped:
        backend._group_end()


def _connections(pid: int) -> list[tuple[int, Address, Address]]:
    """Returns (descriptor, own address, peer's address) of each TCP connection of a process; [] if it has ended."""
    try:
        process = psutil.Process(pid)
        # `connections` is the name in psutil 5, which kernels of older images have imported.
        found = getattr(process, "net_connections", None) or process.connections
        connections = found(kind="tcp")
    except psutil.NoSuchProcess:
        return []
    established = [c for c in connections if c.status == psutil.CONN_ESTABLISHED]
    return [(c.fd, _address(c.laddr), _address(c.raddr)) for c in established]


def _address(address: Sequence[Any]) -> Address:
    """Returns host and port, without the interface that `getsockname` adds to the host: "fe80::1%eth0"."""
    return str(address[0]).partition("%")[0], int(address[1])
