"""The end of what a program has printed."""

from __future__ import annotations

_TRACEBACK = "Traceback (most recent call last)"
# A traceback that is longer is cut.
_MOST_LINES = 150


def last_lines(text: str, num_lines: int = 25) -> str:
    """The last lines, and more where a traceback began above them. A progress bar is one line, as on a terminal."""
    # A bar writes its line many times, each behind a carriage return.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    lines = [line for line in lines if line]
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line and number >= len(lines) - _MOST_LINES]
    begin = min([len(lines) - num_lines, *begins[-1:]])
    return "\n".join(lines[max(0, begin) :])
