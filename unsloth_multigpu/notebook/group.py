"""The process group of a notebook's ranks: a new one after a cell that failed, and how another thread aborts it.

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

# All ranks begin to make a group at the same time, so this limit is long enough.
_MEET_LIMIT_S = 60.0

Address = tuple[str, int]


def open_group(run_dir: Path, generation: int, backend: str, timeout_s: float) -> None:
    """Makes the default process group of this generation. Collective.

    The ranks meet by a file in the run's private folder: no port is open, and no other user can join.

    Args:
        run_dir: The run's private folder.
        generation: Number of this group; it grows by one with each group.
        backend: "gloo", "nccl", "xccl".
        timeout_s: Limit of one collective, in seconds.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind_of(backend) is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    path = run_dir / f"store_{generation}"
    # The store itself would make a file that others can read.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    store = FileStore(str(path), world_size)
    Board(rank, store).meet(world_size, timeout_s=min(timeout_s, _MEET_LIMIT_S), hint="Restart the kernel.")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    dist.barrier()


def store_of_group() -> Store:
    """Keys and values that the ranks of the default process group share. A new group brings an empty store."""
    return dist.distributed_c10d._get_default_store()


def close_group() -> None:
    """Ends the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_group(pids: Sequence[int]) -> None:
    """Lets a collective in which another thread waits raise an error. The group cannot be used afterwards.

    gloo: `abort()` does not end a wait (torch 2.13); shutting the connections between the ranks does, at once. A
    listening socket is left alone: shutting one ends the process.

    Args:
        pids: Processes of all ranks.
    """
    if not dist.is_initialized():
        return
    _abort_backends()
    theirs = {(there, here) for pid in pids if pid != os.getpid() for _, here, there in _connections(pid)}
    for descriptor, here, there in _connections(os.getpid()):
        if (here, there) in theirs:
            _shut(descriptor, here, there)


def _shut(descriptor: int, here: Address, there: Address) -> None:
    """Shuts one connection, unless gloo has closed it: its descriptor may belong to something else by then."""
    try:
        own = os.dup(descriptor)
    except OSError:
        return
    try:
        end = socket.socket(fileno=own)
    except OSError:  # It is not a socket any more.
        os.close(own)
        return
    with end, suppress(OSError):  # The other side may have shut it first.
        if (_address(end.getsockname()), _address(end.getpeername())) == (here, there):
            end.shutdown(socket.SHUT_RDWR)


def _abort_backends() -> None:
    """Those of accelerators, together: one after the other they can wait for each other (pytorch#119797)."""
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
    """Descriptor, own address and the other side's of each TCP connection of a process; none if it has ended."""
    try:
        process = psutil.Process(pid)
        # Kernels of older images have imported psutil 5 already, which has this name.
        found = getattr(process, "net_connections", None) or process.connections
        connections = found(kind="tcp")
    except psutil.NoSuchProcess:
        return []
    established = [c for c in connections if c.status == psutil.CONN_ESTABLISHED]
    return [(c.fd, _address(c.laddr), _address(c.raddr)) for c in established]


def _address(address: Sequence[Any]) -> Address:
    """Host and port. `getsockname` writes the interface behind the host, psutil does not: "fe80::1%eth0"."""
    return str(address[0]).partition("%")[0], int(address[1])
