"""One worker process, as the kernel sees it, and the channel between the two."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.launch.channel import Frames
from unsloth_multigpu.launch.child import Child

# A message that a worker has not read after so long ends it: its thread reads unless native code keeps the lock.
_SEND_LIMIT_S = 30.0
_PROGRAM = "from unsloth_multigpu.notebook.worker import main; main()"


class WorkerProcess(Child):
    """Starts the process of a rank above 0, and holds what is known of it.

    Args:
        rank: Which rank.
        log: Where its output goes.
        environment: All of its variables.

    Attributes:
        is_ready: It waits for cells.
        start_failures: What it could not do of what the kernel did before its first cell.
        ended: The message by which it ended a cell, by the cell's number. The last ones.
        waits: The last collective before what it waits for rank 0 to make, in this cell; None = it does not wait.
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
        """Sends a message; one that nobody reads ends a process that is stopped."""
        if self.exit_code is not None:
            return
        try:
            self.channel.send(kind, **fields)
        except TimeoutError:
            self.kill(f"it has read nothing for {_SEND_LIMIT_S:g} seconds")
        except OSError:
            self.kill()  # It is ending.

    def end(self, limit_s: float) -> None:
        """Asks the process to end, and kills it after `limit_s`."""
        if self.exit_code is not None or not self.is_mine():
            return
        with suppress(OSError):
            self.channel.send("exit")
        self.has_ended(limit_s)
        self.collect()

    def close(self) -> None:
        """Lets go of the descriptors, here or in a forked child."""
        self.channel.close()
        os.close(self.pid_descriptor)


def died(worker: WorkerProcess) -> DistributedError:
    """What the user reads of a worker that has ended."""
    return DistributedError(
        worker.describe_death(),
        hint="This kernel goes on alone and keeps its model: save it. Restart the kernel to train on all ranks.",
    )


class Channel:
    """One end of a pair of sockets, over which kernel and worker send each other JSON. No pickle.

    Any thread may send; one thread receives.

    Args:
        end: A connected stream socket, owned from now on.
        send_limit_s: How long a message may wait for a reader that does not read; None = for ever.
    """

    def __init__(self, end: socket.socket, send_limit_s: float | None = None) -> None:
        self._frames = Frames(end, send_limit_s)

    def fileno(self) -> int:
        """Readable when there is something to receive."""
        return self._frames.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message: its kind and what JSON can say.

        Raises:
            OSError: The other side is gone, or does not read. A message that was cut off ends the pair.
        """
        self._frames.send(json.dumps({"kind": kind, **fields}).encode())

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for bytes and returns the messages that are whole by now; None when the other side is gone."""
        messages = self._frames.receive()
        if messages is None:
            return None
        # All of them: who hears of the other side's end next is to know what it said before.
        while self._frames.has_more() and (more := self._frames.receive()) is not None:
            messages += more
        return [json.loads(message) for message in messages]

    def close(self) -> None:
        """Closes this end. The other side sees that the pair has ended."""
        self._frames.close()
