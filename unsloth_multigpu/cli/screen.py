"""What a command shows: colour, tables as wide as the window and a bar on a terminal; plain lines everywhere else.

rich is imported where there is a terminal, so that a pipe or a log pays nothing for it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from unsloth_multigpu.words import aligned, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


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
        if not self.is_terminal:
            self.line("\n".join(aligned([columns, *rows], num_left)))
            return
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        num_left = len(columns) if num_left is None else num_left
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for number, name in enumerate(columns):
            table.add_column(Text(name), justify="left" if number < num_left else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell, style=_style_of(cell)) for cell in row))
        self.console.print(table)


def _plain(value: Any) -> Any:
    """With text in place of the numbers that JSON does not have: nan, inf."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _style_of(cell: str) -> str:
    """What is marked in plain text, by a "!" or in capitals, is red."""
    return "bold red" if cell.startswith("!") or cell == "OTHER" else ""


class Progress:
    """How far a command is, on stderr: a bar on a terminal, a line for each item elsewhere.

    Args:
        name: Of the command, at the begin of each line.
        stream: None = stderr.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._screen = Screen(sys.stderr if stream is None else stream)
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clear()

    def say(self, text: str, style: str | None = None) -> None:
        """A line that stays."""
        if self._bar is not None and self._bar.live.is_started:
            self._bar.console.print(f"{self._name}: {text}", style=style, soft_wrap=True)
        else:
            self._screen.line(f"{self._name}: {text}", style)

    def begin(self, number: int, total: int, what: str, left_s: float | None = None) -> None:
        """The next item begins.

        Args:
            number: Of the item, from 1.
            what: Its name.
            left_s: Expected seconds until all are done, this one included; None = not known.
        """
        left = "" if left_s is None else f", {about(left_s)} left"
        if self._screen.is_terminal:
            self.show(f"{what} ({number} of {total}{left})", number - 1, total)
        else:
            self.say(f"{number} of {total}: {what}{left}")

    def show(self, what: str, done: float, total: float) -> None:
        """Moves the bar; a stream that is no terminal shows nothing of it."""
        if not self._screen.is_terminal:
            return
        if self._bar is None:
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                console=self._screen.console,
                transient=True,
            )
            self._bar.add_task("")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=f"{self._name}: {what}", completed=done, total=total)

    def clear(self) -> None:
        """Takes the bar away, so that others may write."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def about(seconds: float) -> str:
    """A time that is an estimate: "about 3 min 20 s"."""
    return f"about {duration(seconds)}"


def left_s(expected_s: Sequence[float], took_s: Sequence[float]) -> float:
    """Seconds of what is left: what was expected of it, by how what is done compares with what was expected of that.

    Args:
        expected_s: Of every item.
        took_s: Of those that are done, the first ones.
    """
    done_s = sum(expected_s[: len(took_s)])
    pace = sum(took_s) / done_s if done_s else 1.0
    return pace * sum(expected_s[len(took_s) :])
