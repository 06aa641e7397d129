"""The end of what a program has printed."""

from __future__ import annotations

from unsloth_multigpu.words import shown_lines

_TRACEBACK = "Traceback (most recent call last)"
# A traceback that is longer is cut.
_MOST_LINES = 150


def last_lines(text: str, num_lines: int = 25) -> str:
    """The last lines, and more where a traceback began above them. A progress bar is one line, as on a terminal."""
    lines = shown_lines(text)
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line and number >= len(lines) - _MOST_LINES]
    begin = min([len(lines) - num_lines, *begins[-1:]])
    return "\n".join(lines[max(0, begin) :])
