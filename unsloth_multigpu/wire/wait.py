"""Waiting for what other processes do, with a limit."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

# A look at a page or at the store takes microseconds to a millisecond.
POLL_S = 0.02


def wait_until(condition: Callable[[], bool], deadline_s: float, poll_s: float = POLL_S) -> bool:
    """Polls until `condition()`. False where it does not hold by the deadline.

    Args:
        condition: May raise, which ends the wait.
        deadline_s: On the clock of `time.monotonic`.
        poll_s: Seconds between two looks.
    """
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(poll_s)
    return True


def is_readable(file: Any, limit_s: float = 0.0) -> bool:
    """Waits until a file or socket can be read; False where it cannot after `limit_s`."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))
