"""One slot, as the server sees it: a place for one client at a time, and the process that now fills it."""

from __future__ import annotations

import json
import os
import pickle
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unsloth_multigpu.federated.device import SlotDevice
from unsloth_multigpu.federated.task import Task
from unsloth_multigpu.wire.child import Child, read_tail
from unsloth_multigpu.wire.folder import make_log
from unsloth_multigpu.wire.frames import Frames
from unsloth_multigpu.wire.process import send_signal
from unsloth_multigpu.wire.stack import main_frames, place_of

# The slot imports the user's modules and this package from where this process finds them.
_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from unsloth_multigpu.federated.worker import main
main()"""


class Slot:
    """Starts and ends the slot's processes, one after the other.

    Args:
        index: Its place among all slots.
        device: The only one that its processes see.
        log_dir: Where slot_N.log is.

    Attributes:
        task: What its client is doing; None = it waits.
        is_ready: Its process takes messages.
        is_fresh: Its process has taken none yet.
        num_failed_starts: Since it last answered.
        is_retired: It gets no process any more.
    """

    def __init__(self, index: int, device: SlotDevice, log_dir: Path) -> None:
        self.index = index
        self.device = device
        self.log = log_dir / f"slot_{index}.log"
        self.task: Task | None = None
        self.is_ready = False
        self.is_fresh = True
        self.started_s = 0.0
        self.num_failed_starts = 0
        self.is_retired = False
        self._child: Child | None = None
        self._frames: Frames | None = None
        make_log(self.log)

    def __str__(self) -> str:
        return f"slot {self.index}, {self.device}"

    @property
    def is_live(self) -> bool:
        """It has a process."""
        return self._child is not None

    @property
    def pid(self) -> int | None:
        """Of its process; None where it has none."""
        return None if self._child is None else self._child.pid

    def start(self, environment: Mapping[str, str], setup: tuple[Any, ...]) -> None:
        """Starts a process, which says when it is ready.

        Args:
            environment: All of its variables.
            setup: What `worker.main` expects.
        """
        child = Child(
            f"slot {self.index} on {self.device}",
            _PROGRAM,
            self.log,
            environment,
            [json.dumps(list(map(str, sys.path)))],
        )
        self._child, self._frames = child, Frames(child.connection, 0.0)
        self.is_ready, self.is_fresh, self.started_s = False, True, time.monotonic()
        self._frames.put(pickle.dumps(setup))

    def give(self, task: Task) -> None:
        """Queues a task for the process; `register` sends the rest when the process reads."""
        assert self._frames is not None
        self.task = task
        task.begin(self.index, self.device, is_first=self.is_fresh)
        self.is_fresh = False
        self._frames.put(task.pack())

    def register(self, poll: select.poll) -> dict[int, Slot]:
        """Registers the descriptors of the process and of its socket with `poll`, and returns them."""
        if self._child is None or self._frames is None:
            return {}
        wants = select.POLLIN | (0 if self._is_sent() else select.POLLOUT)
        poll.register(self._frames.fileno(), wants)
        poll.register(self._child.pid_descriptor, select.POLLIN)
        return {self._frames.fileno(): self, self._child.pid_descriptor: self}

    def receive(self) -> list[tuple[Any, ...]] | None:
        """What the process has said by now; None when it has ended, or is about to."""
        assert self._frames is not None
        try:
            messages = self._frames.receive()
        except BlockingIOError:
            # Asked only when no message is left: the last one of a process that has ended counts.
            return None if self.has_ended() else []
        # Safe to unpickle: it comes from our own child, which runs the same user's code.
        return None if messages is None else [pickle.loads(data) for data in messages]

    def has_ended(self) -> bool:
        """Its process has ended, and this process has not taken note of it."""
        assert self._child is not None
        return self._child.has_ended()

    def end(self, because: str = "") -> str:
        """Kills the process and what it has started.

        Returns:
            How it ended, in one line.
        """
        child, frames = self._child, self._frames
        self._child = self._frames = self.task = None
        self.is_ready = False
        if child is None or frames is None:
            return ""
        if child.is_mine():
            if because:
                child.kill(because)
            child.collect()
        frames.close()
        os.close(child.pid_descriptor)
        return child.describe_end()

    def tail(self) -> str:
        """The last lines of its log."""
        return read_tail(self.log)

    def ask_for_stack(self) -> int:
        """Lets the process write its stacks to its log; returns where they will begin."""
        size = 0
        with suppress(OSError):  # The log was removed.
            size = self.log.stat().st_size
        if self._child is not None:
            from unsloth_multigpu.federated.worker import STACK_SIGNAL

            send_signal(self._child.pid, STACK_SIGNAL)
        return size

    def place_in_code(self, begin: int) -> str:
        """The user's line in stacks that begin there in the log; "" where there is none."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(begin)
            return place_of(main_frames(log.read().decode(errors="replace")))
        return ""

    def _is_sent(self) -> bool:
        assert self._frames is not None
        try:
            return self._frames.flush()
        except OSError:
            return True  # The process is ending; its other descriptor reports that.
