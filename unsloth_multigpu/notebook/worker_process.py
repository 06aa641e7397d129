"""One worker process, as the kernel sees it, and the channel between both."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.wire.child import Child
from unsloth_multigpu.wire.frames import Frames

# A worker that reads no message for this long is killed. Its thread reads, unless native code holds Python's lock.
_SEND_LIMIT_S = 30.0
_PROGRAM = "from unsloth_multigpu.notebook.worker import main; main()"


class WorkerProcess(Child):
    """Starts the process of a rank above 0, and keeps its messages.

    Args:
        rank: Which rank.
        log: Where its output goes.
        environment: All of its variables.

    Attributes:
        is_ready: It takes cells.
        start_failures: Extensions of the kernel that could not be loaded there.
        ended: The message with which it ended a cell, by the number of the cell. Only the last ones are kept.
        waits: While it waits for a value of rank 0, the number of its last collective; None = it does not wait.
    """

    def __init__(self, rank: int, log: Path, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.is_ready = False
        self.start_failures: list[str] = []
        self.ended: dict[int, dict[str, Any]] = {}
        self.waits: int | None = None
        super().__init__(f"rank {rank}", _PROGRAM, log, environment)
        self.channel = Channel(self.connection, _SEND_LIMIT_S)

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message. A process that does not read it is killed."""
        if self.exit_code is not None:
            return
        try:
            self.channel.send(kind, **fields)
        except TimeoutError:
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
    """The error that tells the user that a worker has ended."""
    return DistributedError(
        worker.describe_death(),
        hint="This kernel continues alone and keeps its model, unless shard='on' has divided it: save it. Restart the "
        "kernel to train on all ranks.",
    )


class Channel:
    """One end of a pair of sockets, over which kernel and worker send each other JSON. No pickle.

    Any thread may send; one thread receives.

    Args:
        end: A connected stream socket, owned from now on.
        send_limit_s: How long a message may wait for a reader that does not read; None = no limit.
    """

    def __init__(self, end: socket.socket, send_limit_s: float | None = None) -> None:
        self._frames = Frames(end, send_limit_s)

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._frames.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message: its kind, and fields that JSON can hold.

        Raises:
            OSError: The other side is gone, or does not read. A message that was cut off ends the pair.
        """
        self._frames.send(json.dumps({"kind": kind, **fields}).encode())

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for bytes and returns the messages that are whole by now; None when the other side is gone."""
        messages = self._frames.receive()
        if messages is None:
            return None
        # All messages, so that the last one is known before the end of the other side.
        while self._frames.has_more() and (more := self._frames.receive()) is not None:
            messages += more
        return [json.loads(message) for message in messages]

    def close(self) -> None:
        """Closes this end, which the other side sees."""
        self._frames.close()
