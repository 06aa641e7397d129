"""Measures times on a device, and how long a rank waits for others, without collectives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def moment(device: torch.device) -> Any:
    """Returns the current time for a `Lap`. On a GPU it is an event of its current stream, which nothing waits for."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


class Lap:
    """The time between two moments, such as that of a micro-batch. On a GPU it may not be over yet."""

    def __init__(self, begin: Any, end: Any) -> None:
        self._begin = begin
        self._end = end

    def is_over(self) -> bool:
        """False while the device has not passed the end. Does not wait."""
        return isinstance(self._end, float) or bool(self._end.query())

    def seconds(self) -> float:
        """Returns the seconds. Waits for the device if it has not passed the end."""
        if isinstance(self._end, float):
            return self._end - float(self._begin)
        if not self._end.query():
            self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000


class Waits:
    """Adds up the seconds in which this rank waits for others, including the transfer.

    These are the all-reduce of gradients after this rank's last gradient, our own collectives, what the Trainer gathers
    (such as token counts), and waiting for decisions of rank 0. On an accelerator, the times come from events around
    each wait, which are read when they are over, so that the host does not wait for the device.

    Attributes:
        seconds: Total of the waits that are over, since this object was created.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._device = torch.device("cpu")  # Until a training begins.
        self._is_counting = False
        self._pending: deque[Lap] = deque()

    def count_on(self, device: torch.device) -> None:
        """Uses the clock of the device that trains."""
        if device != self._device:
            self.settle()
            self._device = device

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the time inside the context as waiting. Nested contexts count once."""
        if self._is_counting:
            yield
            return
        self._is_counting, begin = True, self.now()
        try:
            yield
        finally:
            self._is_counting = False
        # Not after an error: an event cannot be recorded on a device with an error, and would hide that error.
        self.add(begin, self.now())

    def now(self) -> Any:
        """See `moment`."""
        return moment(self._device)

    def add(self, begin: Any, end: Any) -> None:
        """Counts the time between two moments."""
        self._pending.append(Lap(begin, end))
        self.poll()

    def poll(self) -> None:
        """Adds the waits that are over on the device. Does not wait for it."""
        while self._pending and self._pending[0].is_over():
            self.seconds += self._pending.popleft().seconds()

    def settle(self) -> None:
        """Adds all waits. Waits for the device."""
        while self._pending:
            self.seconds += self._pending.popleft().seconds()
