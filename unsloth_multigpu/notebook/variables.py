"""The environment variables of a notebook's rank: set while the ranks live, hidden from programs that cells start."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Variables by which a rank tells accelerate its device, and NCCL the abilities of the device.
DEVICE_VARIABLES = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_BYPASS_DEVICE_MAP"),
    *("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"),
)


class RankVariables:
    """Environment variables that are visible only to this process while the ranks live.

    A program that a cell starts with `!python other.py` would take itself for a rank and wait for the others. `before`
    has the earlier values, None for a variable that was not set.
    """

    def __init__(self, values: Mapping[str, str], before: Mapping[str, str | None]) -> None:
        self._values = dict(values)
        self.before = dict(before)

    @contextmanager
    def in_effect(self) -> Iterator[None]:
        """Sets the variables within the context."""
        _write(self._values)
        try:
            yield
        finally:
            _write(self.before)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Restores the earlier values within the context. No effect in other threads: the running cell needs them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        now = {name: os.environ.get(name) for name in self.before}
        _write(self.before)
        try:
            yield
        finally:
            _write(now)


def _write(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
