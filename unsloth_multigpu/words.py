"""Figures in words: durations, sizes, exit codes, long lists; columns; the lines of a log as a terminal shows them."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
GIB = 2**30
_TRACEBACK = "Traceback (most recent call last)"
# A traceback that is longer is cut.
_MOST_LINES = 150


def duration(seconds: float) -> str:
    """A time as people say it: "0.25 s", "48 s", "3 min 05 s", "14 min", "2 h 01 min" or "3 d 4 h"."""
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
    """A size in GiB: "14.70 GiB"."""
    return f"{num_bytes / GIB:.{digits}f} GiB"


def in_gib(num_bytes: int) -> str:
    """ "28" or, below ten, "7.4"."""
    size = num_bytes / GIB
    return f"{size:.0f}" if size >= 10 else f"{size:.1f}" if size >= 0.1 else f"{size:.3f}"


def signal_name(number: int) -> str:
    """ "SIGKILL"; a real-time signal has a number only: "signal 40"."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def how_ended(code: int) -> str:
    """How a process ended: "ended with exit code 3", or "was ended by SIGKILL, ...".

    Args:
        code: As `subprocess` returns it: negative = the number of the signal.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    likely = ", as the system does when the machine has no memory left" if code == -signal.SIGKILL else ""
    return f"was ended by {signal_name(-code)}{likely}"


def listed(names: Sequence[str], most: int = 4, separator: str = ", ") -> str:
    """The first names, and how many others there are: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def shown_lines(text: str) -> list[str]:
    """The lines of a log that are not empty, as a terminal shows them: of a progress bar, which writes its line many
    times, each behind a carriage return, the last state.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line for line in lines if line]


def last_lines(text: str, num_lines: int = 25) -> str:
    """The last lines, and more where a traceback began above them. A progress bar is one line, as on a terminal."""
    lines = shown_lines(text)
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line and number >= len(lines) - _MOST_LINES]
    begin = min([len(lines) - num_lines, *begins[-1:]])
    return "\n".join(lines[max(0, begin) :])


def aligned(rows: Iterable[Sequence[str]], num_left: int | None = None) -> list[str]:
    """One line for each row, its columns two spaces apart and as wide as their widest cell.

    Args:
        rows: `rows[line][column]`, all of the same length; the names of the columns are a row as well.
        num_left: This many columns, from the first, are left-aligned, the others right-aligned. None = all.
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
