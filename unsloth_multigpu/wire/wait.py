"""Waits with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable

# Reading a page or the store takes microseconds to a millisecond.
POLL_S = 0.02


def wait_until(condition: Callable[[], bool], deadline_s: float, poll_s: float = POLL_S) -> bool:
    """Polls until `condition()` is true. Returns False if it is not by the deadline, a time of `time.monotonic`."""
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(poll_s)
    return True
