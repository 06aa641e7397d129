"""The process group of a notebook's ranks: made anew after a cell that failed, and aborted from another thread."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store

from unsloth_multigpu.errors import RankTimeoutError

# The ranks begin to make a group at the same time.
_MEET_LIMIT_S = 60.0
_POLL_S = 0.002
_ESTABLISHED = "01"


def open_group(run_dir: Path, generation: int, backend: str, timeout_s: float) -> None:
    """Makes the default process group of this generation. Collective.

    The ranks meet by a file in the run's private folder: no port, and nobody else can come in.

    Args:
        run_dir: The run's private folder.
        generation: Grows by one each time.
        backend: "gloo", "nccl", "xccl".
        timeout_s: Limit of one collective, in seconds.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if backend != "gloo":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    path = run_dir / f"store_{generation}"
    # The store's own way to make it lets others read it.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    store = FileStore(str(path), world_size)
    _meet(store, rank, world_size, min(timeout_s, _MEET_LIMIT_S))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    dist.barrier()


def _meet(store: FileStore, rank: int, world_size: int, limit_s: float) -> None:
    """Waits for the other ranks in Python, where Stop and the monitor reach it: torch waits in C++ for `timeout_s`."""
    store.set(f"here/{rank}", "1")
    deadline_s = time.monotonic() + limit_s
    missing = [f"here/{other}" for other in range(world_size)]
    while missing := [key for key in missing if not store.check([key])]:
        if time.monotonic() > deadline_s:
            ranks = ", ".join(key.rpartition("/")[2] for key in missing)
            raise RankTimeoutError(
                f"rank(s) {ranks} did not come to open the process group within {limit_s:g} seconds.",
                hint="Restart the kernel.",
            )
        time.sleep(_POLL_S)


def store_of_group() -> Store:
    """Keys and values that the ranks of the default process group share. A new group brings an empty store."""
    return dist.distributed_c10d._get_default_store()


def close_group() -> None:
    """Ends the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_group(pids: Sequence[int]) -> None:
    """Lets a collective in which another thread waits raise an error. The groups are of no use afterwards.

    gloo: `abort()` wakes nobody (torch 2.13); shutting the connections between the ranks does, at once. A listening
    socket is left alone: shutting that ends the process.

    Args:
        pids: Processes of all ranks.
    """
    if not dist.is_initialized():
        return
    _abort_backends()
    connections = _connections()
    others = {connections[i] for pid in pids if pid != os.getpid() for i in _sockets(pid) if i in connections}
    for inode, descriptor in _sockets(os.getpid()).items():
        here, there = connections.get(inode, ("", ""))
        if (there, here) in others:
            _shut(descriptor, inode)


def _shut(descriptor: int, inode: str) -> None:
    """Shuts one connection. gloo may have closed its end by now, and its number may be another's."""
    try:
        own = os.dup(descriptor)
    except OSError:
        return
    if os.readlink(f"/proc/self/fd/{own}") != f"socket:[{inode}]":
        os.close(own)
        return
    with socket.socket(fileno=own) as end, suppress(OSError):  # The other end was quicker.
        end.shutdown(socket.SHUT_RDWR)


def _abort_backends() -> None:
    """NCCL's and XCCL's, together: one after the other they can wait for each other (pytorch#119797)."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    backends = []
    for group, (name, _) in list(c10d._world.pg_map.items()):
        if "nccl" in name or "xccl" in name:
            backends.append(group._get_backend(torch.device("cuda" if "nccl" in name else "xpu")))
    grouped = [backend for backend in backends[:1] if hasattr(backend, "_group_start")]
    for backend in grouped:
        backend._group_start()
    for backend in backends:
        backend.abort()
    for backend in grouped:
        backend._group_end()


def _connections() -> dict[str, tuple[str, str]]:
    """Both ends of every connection of this machine, as the system writes them, by the socket's inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/self/net/{name}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                found[fields[9]] = (fields[1], fields[2])
    return found


def _sockets(pid: int) -> dict[str, int]:
    """Descriptors of a process's sockets by inode; nothing of a process that has ended."""
    found = {}
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return {}
    for entry in entries:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except OSError:
            continue  # Closed meanwhile.
        if target.startswith("socket:["):
            found[target[len("socket:[") : -1]] = int(entry)
    return found
