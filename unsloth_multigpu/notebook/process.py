"""One worker process, as the kernel sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.notebook.channel import Channel
from unsloth_multigpu.wire.child import Child

# A message that a worker has not read after so long ends it: its thread reads unless native code keeps the lock.
_SEND_LIMIT_S = 30.0
_PROGRAM = "from unsloth_multigpu.notebook.worker import main; main()"


class Worker(Child):
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


def died(worker: Worker) -> DistributedError:
    """What the user reads of a worker that has ended."""
    return DistributedError(
        worker.describe_death(),
        hint="This kernel goes on alone and keeps its model: save it. Restart the kernel to train on all ranks.",
    )
