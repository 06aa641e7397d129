"""The kernel's handle of a worker process, and the channel between both."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.options import ENV_NOTEBOOK
from unsloth_multigpu.wire.child import Child

# A worker that reads no message for this long is killed: its thread always reads, unless native code holds the GIL.
_SEND_LIMIT_S = 30.0
# With the sys.path of the kernel, which may have this package, and has no current folder with names of modules.
_PROGRAM = f"""import json, os, sys
sys.path[:] = json.loads(os.environ["{ENV_NOTEBOOK}"])["path"]
from unsloth_multigpu.notebook.worker import main
main()"""
# The hint of errors after which there are no workers.
ALONE = (
    "This kernel continues alone and keeps its model, unless shard='on' has divided it: save it. Restart the kernel to "
    "train on all ranks."
)


class WorkerProcess(Child):
    """Starts the process of a rank above 0, and keeps its messages.

    Attributes:
        is_ready: It accepts cells.
        ended: Its message about the end of a cell, by the number of the cell. Only the latest are kept.
        waits: While it waits for a value of rank 0, the number of its last collective; None = it does not wait.
    """

    def __init__(self, rank: int, log: Path, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.is_ready = False
        self.ended: dict[int, dict[str, Any]] = {}
        self.waits: int | None = None
        super().__init__(f"rank {rank}", _PROGRAM, log, environment)
        self.channel = Channel(self.connection, _SEND_LIMIT_S)

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message, and kills a process that does not read it."""
        if self.exit_code is not None:
            return
        try:
            self.channel.send(kind, **fields)
        except BlockingIOError:
            self.kill(f"it has read nothing for {_SEND_LIMIT_S:g} seconds")
        except OSError:
            self.kill()  # The process is ending.

    def end(self, limit_s: float) -> None:
        """Asks the process to end, and kills it after `limit_s`."""
        if self.exit_code is not None or not self.is_mine():
            return
        with suppress(OSError):
            self.channel.send("exit")
        self.has_ended(limit_s)
        self.collect()

    def close(self) -> None:
        """Closes the descriptors, in this process or in a forked child."""
        self.channel.close()
        os.close(self.pid_descriptor)


def died(worker: WorkerProcess) -> DistributedError:
    """Returns the error about a worker that has ended."""
    return DistributedError(worker.describe_death(), hint=ALONE)


class Channel:
    """One end of a socket pair, over which kernel and worker exchange JSON messages. No pickle.

    Any thread may send; one thread receives. The channel closes the connection. Sending may wait `send_limit_s` for the
    reader; None = no limit.
    """

    def __init__(self, end: Connection, send_limit_s: float | None = None) -> None:
        self._end = end
        self._lock = threading.Lock()
        self.fileno = end.fileno
        self.close = end.close
        if send_limit_s is not None:
            with socket.socket(fileno=os.dup(end.fileno())) as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(send_limit_s), 0))

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message: its kind, and fields that JSON can hold.

        Raises BlockingIOError if the other side does not read: the message may be cut off, which ends the pair. Raises
        OSError if the other side is gone.
        """
        with self._lock:
            self._end.send_bytes(json.dumps({"kind": kind, **fields}).encode())

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for a message and returns all that have arrived; None if the other side is gone."""
        messages: list[dict[str, Any]] = []
        try:
            while not messages or self._end.poll():
                messages.append(json.loads(self._end.recv_bytes()))
        except (EOFError, OSError):
            return messages or None
        return messages
