"""Output of commands: colours and a progress line on a terminal, plain lines elsewhere.

rich is imported only for a terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from unsloth_multigpu.words import aligned

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """A stream that a command writes to, None = stdout.

    Attributes:
        is_terminal: The stream is a terminal. Colours are left out if NO_COLOR is set.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.is_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"

    @cached_property
    def console(self) -> Console:
        """rich's console for the stream."""
        from rich.console import Console

        # Without rich's highlighting and markup: our lines are shown unchanged.
        return Console(file=self.stream, highlight=False, markup=False, emoji=False, force_terminal=self.is_terminal)

    def line(self, text: str = "", style: str | None = None) -> None:
        """Prints a line and flushes the stream. `style`, such as "bold red", is used on a terminal only."""
        if self.is_terminal and style is not None:
            self.console.print(text, style=style, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def json(self, value: Any) -> None:
        """Prints a value as standard JSON. NaN and infinity, which JSON does not have, are replaced by text."""
        plain = json.loads(json.dumps(value), parse_constant=lambda name: str(float(name)))
        self.line(json.dumps(plain, indent=1, allow_nan=False))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], num_left: int | None = None) -> None:
        """Prints a table with the names of its columns. The first `num_left` columns, None = all, are left-aligned."""
        rows = list(rows)
        names, *lines = aligned([columns, *rows], num_left)
        self.line(names, "bold")
        for line, row in zip(lines, rows, strict=True):
            # A row is red if its text is marked, too, by "!" or "OTHER".
            is_marked = any(cell.startswith("!") or cell == "OTHER" for cell in row)
            self.line(line, "bold red" if is_marked else None)


class Progress:
    """Progress of a command on stderr: one updated line on a terminal, one line per item elsewhere.

    Each line begins with `name`, the name of the command.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._screen = Screen(sys.stderr if stream is None else stream)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clear()

    def say(self, text: str, style: str | None = None) -> None:
        """Prints a line that stays."""
        self.clear()
        self._screen.line(f"{self._name}: {text}", style)

    def begin(self, number: int, total: int, what: str) -> None:
        """Shows that item `number`, from 1, of `total` begins."""
        if self._screen.is_terminal:
            self.show(f"{what} ({number} of {total})")
        else:
            self.say(f"{number} of {total}: {what}")

    def show(self, what: str) -> None:
        """Updates the progress line. Has no effect if the stream is not a terminal."""
        self.clear()
        if self._screen.is_terminal:
            # Cut, because a line that wraps could not be removed.
            width = shutil.get_terminal_size().columns
            print(f"{self._name}: {what}"[: width - 1], end="", file=self._screen.stream, flush=True)

    def clear(self) -> None:
        """Removes the progress line, so that other output can follow."""
        if self._screen.is_terminal:
            print("\r\x1b[2K", end="", file=self._screen.stream, flush=True)
