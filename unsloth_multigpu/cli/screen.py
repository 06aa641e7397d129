"""What a command shows: colour, and a line that changes, on a terminal; plain lines everywhere else.

rich is imported where there is a terminal, so that a pipe or a log pays nothing for it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from unsloth_multigpu.words import aligned

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


class Screen:
    """A stream that a command writes to.

    Args:
        stream: None = stdout.

    Attributes:
        is_terminal: Somebody sees it as it comes; colour is left out where NO_COLOR is set.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.is_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        """rich's console on the stream; it colours on a terminal only."""
        if self._console is None:
            from rich.console import Console

            # No guesses: what looks like a number, a path or a tag in our lines is shown as it is.
            self._console = Console(
                file=self.stream, highlight=False, markup=False, emoji=False, force_terminal=self.is_terminal
            )
        return self._console

    def line(self, text: str = "", style: str | None = None) -> None:
        """A line, which is there when this returns.

        Args:
            style: In rich's words, such as "bold red"; left out where it is no terminal.
        """
        if self.is_terminal and style is not None:
            self.console.print(text, style=style, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def json(self, value: Any) -> None:
        """A value as JSON that every reader takes."""
        self.line(json.dumps(_plain(value), indent=1, allow_nan=False))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], num_left: int | None = None) -> None:
        """A table with the names of its columns.

        Args:
            rows: `rows[line][column]`.
            num_left: This many columns, from the first, are left-aligned, the others right-aligned. None = all.
        """
        rows = list(rows)
        names, *lines = aligned([columns, *rows], num_left)
        self.line(names, "bold")
        for line, row in zip(lines, rows, strict=True):
            # What is marked in plain text, by a "!" or in capitals, is red.
            is_marked = any(cell.startswith("!") or cell == "OTHER" for cell in row)
            self.line(line, "bold red" if is_marked else None)


def _plain(value: Any) -> Any:
    """With text in place of the numbers that JSON does not have: nan, inf."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """What a command does now, on stderr: a line that changes on a terminal, a line for each item elsewhere.

    Args:
        name: Of the command, at the begin of each line.
        stream: None = stderr.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._screen = Screen(sys.stderr if stream is None else stream)
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clear()

    def say(self, text: str, style: str | None = None) -> None:
        """A line that stays."""
        if self._status is not None:
            self._screen.console.print(f"{self._name}: {text}", style=style, soft_wrap=True)
        else:
            self._screen.line(f"{self._name}: {text}", style)

    def begin(self, number: int, total: int, what: str) -> None:
        """The next item begins.

        Args:
            number: Of the item, from 1.
            what: Its name.
        """
        if self._screen.is_terminal:
            self.show(f"{what} ({number} of {total})")
        else:
            self.say(f"{number} of {total}: {what}")

    def show(self, what: str) -> None:
        """Changes the line; a stream that is no terminal shows nothing of it."""
        if not self._screen.is_terminal:
            return
        from rich.text import Text

        text = Text(f"{self._name}: {what}")
        if self._status is None:
            self._status = self._screen.console.status(text)
            self._status.start()
        self._status.update(text)

    def clear(self) -> None:
        """Takes the line away, so that others may write."""
        if self._status is not None:
            self._status.stop()
            self._status = None
