"""The clock of a device, and how long a rank waits for others: between two of its moments, no rank is asked for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def moment(device: torch.device) -> Any:
    """This point in time, for a `Lap`: on a GPU an event of its current stream, for which nothing waits."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


class Lap:
    """Time between two moments, as of one micro-batch; on a GPU it may still be running."""

    def __init__(self, begin: Any, end: Any) -> None:
        self._begin = begin
        self._end = end

    def is_over(self) -> bool:
        """False while the device has not passed the end. Does not wait."""
        return isinstance(self._end, float) or bool(self._end.query())

    def seconds(self) -> float:
        """Waits for the device if it has to."""
        if isinstance(self._end, float):
            return self._end - float(self._begin)
        if not self._end.query():
            self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000


class Waits:
    """Adds up the seconds in which this rank stands still until others have come.

    On an accelerator the time between two moments around a wait is that in which the device has nothing to do, or sends
    what the ranks exchange. It is read when it is over, so that nothing waits for the device.

    Counted are the exchange of gradients from this rank's last gradient on, our own collectives, what the Trainer
    gathers, such as the count of tokens over ranks, and the wait for what rank 0 decides. The transfer is part of it.

    Args:
        device: Where this rank computes; asked when something is first counted.

    Attributes:
        seconds: All that is over, since this object was made.
    """

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self.seconds = 0.0
        self._find_device = device
        self._device: torch.device | None = None
        self._is_counting = False
        self._pending: deque[Lap] = deque()

    def count_on(self, device: torch.device) -> None:
        """Takes the clock of the device that trains: a script may train on the CPU of a machine with a GPU."""
        if device != self._device:
            self.settle()
            self._device = device

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what happens inside as waiting; once, if it is called inside of itself."""
        if self._is_counting:
            yield
            return
        self._is_counting, begin = True, self.now()
        try:
            yield
        finally:
            self._is_counting = False
        # Not where it failed: an event cannot be recorded on a device that has an error, and would hide that error.
        self.add(begin, self.now())

    def now(self) -> Any:
        """See `moment`."""
        if self._device is None:
            self._device = self._find_device()
        return moment(self._device)

    def add(self, begin: Any, end: Any) -> None:
        """Counts the time between two moments."""
        self._pending.append(Lap(begin, end))
        self.poll()

    def poll(self) -> None:
        """Takes in what the device has passed. Does not wait."""
        while self._pending and self._pending[0].is_over():
            self.seconds += self._pending.popleft().seconds()

    def settle(self) -> None:
        """Takes in all. Waits for the device."""
        while self._pending:
            self.seconds += self._pending.popleft().seconds()
