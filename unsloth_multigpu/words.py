"""Formats durations, sizes, exit codes, lists and tables, and extracts lines from logs."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
GIB = 2**30
_TRACEBACK = "Traceback (most recent call last)"
# Longer tracebacks are cut.
_MOST_LINES = 150


def duration(seconds: float) -> str:
    """Formats a duration: "0.25 s", "48 s", "3 min 05 s", "14 min", "2 h 01 min" or "3 d 4 h"."""
    whole, minutes, hours = round(seconds), round(seconds / _MINUTE_S), round(seconds / _HOUR_S)
    if seconds < 10:
        return f"{seconds:.2g} s"
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < 10 * _MINUTE_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S:02d} s"
    if minutes < 60:
        return f"{minutes} min"
    if seconds < 2 * _DAY_S:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def gib(num_bytes: float, digits: int = 2) -> str:
    """Formats a size: "14.70 GiB"."""
    return f"{num_bytes / GIB:.{digits}f} GiB"


def in_gib(num_bytes: int) -> str:
    """Formats a size in GiB without the unit: "28", below ten "7.4"."""
    size = num_bytes / GIB
    return f"{size:.0f}" if size >= 10 else f"{size:.1f}" if size >= 0.1 else f"{size:.3f}"


def signal_name(number: int) -> str:
    """Returns "SIGKILL", or "signal 40" for a real-time signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def how_ended(code: int) -> str:
    """Describes the end of a process by its `returncode`: "ended with exit code 3" or "was ended by SIGKILL, ..."."""
    if code >= 0:
        return f"ended with exit code {code}"
    likely = ", as the system does when the machine has no memory left" if code == -signal.SIGKILL else ""
    return f"was ended by {signal_name(-code)}{likely}"


def listed(names: Sequence[str], most: int = 4, separator: str = ", ") -> str:
    """Joins the first `most` names and counts the others: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def shown_lines(text: str) -> list[str]:
    """Returns the non-empty lines of a log as a terminal shows them: of a progress bar only the last state."""
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line]


def last_lines(text: str, num_lines: int = 25) -> str:
    """Returns the last lines as a terminal shows them, including the whole of a traceback that begins before them."""
    lines = shown_lines(text)
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line and number >= len(lines) - _MOST_LINES]
    begin = min([len(lines) - num_lines, *begins[-1:]])
    return "\n".join(lines[max(0, begin) :])


def aligned(rows: Iterable[Sequence[str]], num_left: int | None = None) -> list[str]:
    """Formats a table of `rows[line][column]`, the header included, with columns as wide as their widest cell.

    The first `num_left` columns are left-aligned, None = all; the others are right-aligned.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_left = len(widths) if num_left is None else num_left
    return [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
