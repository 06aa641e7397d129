"""The environment variables that make this process a rank: set while a notebook's ranks live, hidden from programs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# With these a rank tells accelerate its device, and NCCL what the device can do.
DEVICE_VARIABLES = (
    *("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_BYPASS_DEVICE_MAP"),
    *("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"),
)


class RankVariables:
    """Environment variables that only this process is to see.

    A program that a cell starts with `!python other.py` would treat itself as a rank and wait for the others.

    Args:
        values: What the variables are while the ranks live.
        before: What they were before, None = not set; left out = what they are now.
    """

    def __init__(self, values: Mapping[str, str], before: Mapping[str, str | None] | None = None) -> None:
        self._values = dict(values)
        self.before = {name: os.environ.get(name) for name in values} if before is None else dict(before)

    @contextmanager
    def in_effect(self) -> Iterator[None]:
        """Sets the variables, and restores them at the end."""
        _write(self._values)
        try:
            yield
        finally:
            _write(self.before)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Removes the variables temporarily. They stay in threads, also of subshells: the cell that runs needs them."""
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
