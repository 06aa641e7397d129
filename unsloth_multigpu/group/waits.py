"""How long a rank waits for the others: between two marks of its own clock, and no rank is asked for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Waits:
    """Adds up the seconds in which this rank stands still until others have come.

    On the CPU it reads the host's clock. On an accelerator a mark is an event in the stream that computes: between two
    marks around a wait lies the time in which the device has nothing to do, or sends what the ranks exchange. Events
    are read when they have passed, so that nothing waits for the device.

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
        self._pending: deque[tuple[Any, Any]] = deque()

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
        """A mark: `time.perf_counter`, or an event on the accelerator."""
        if self._device is None:
            self._device = self._find_device()
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def add(self, begin: Any, end: Any) -> None:
        """Counts the time between two marks."""
        if isinstance(end, float):
            self.seconds += end - begin
        else:
            self._pending.append((begin, end))

    def poll(self) -> None:
        """Takes in what the device has passed. Does not wait."""
        while self._pending and self._pending[0][1].query():
            self._take()

    def settle(self) -> None:
        """Takes in all. Waits for the device."""
        while self._pending:
            self._pending[0][1].synchronize()
            self._take()

    def _take(self) -> None:
        begin, end = self._pending.popleft()
        self.seconds += float(begin.elapsed_time(end)) / 1000
