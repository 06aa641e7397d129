"""The table of `top`, by rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from unsloth_multigpu.overview import Look, columns_of, headline

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEFT = ("rank", "device", "doing", "log")
# What a narrow terminal does without, first to last.
_SPARED = ("log", "padding", "peak", "samples/s", "memory", "device")
# These need so much room, and take more where there is some: one is broken into lines, the other is cut.
_LEAST = {"doing": 14, "log": 16}
_BETWEEN = 2
_MUCH_WAITING = 0.3

Columns = Sequence[tuple[str, Sequence[str]]]


def render(look: Look, width: int) -> RenderableType:
    """The run in one line, and below it a line for each rank.

    Args:
        look: What is shown.
        width: Of the terminal, in characters.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(headline(look), style="bold")
    if not look.rows:
        return Group(head, Text("its ranks are starting"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = fitting(columns_of(look), width)
    for name, _ in columns:
        side: Literal["left", "right"] = "left" if name in _LEFT else "right"
        table.add_column(name, justify=side, no_wrap=name != "doing", overflow="ellipsis", min_width=_LEAST.get(name))
    for i, row in enumerate(look.rows):
        cells = []
        for name, values in columns:
            waits = name == "waiting" and (row.rates.waiting or 0.0) > _MUCH_WAITING
            style = "bold red" if name == "doing" and row.is_stuck else "yellow" if waits else ""
            # Text, because a log may hold what rich would take for mark-up.
            cells.append(Text(values[i], style=style))
        table.add_row(*cells)
    return Group(head, table)


def fitting(columns: Columns, width: int) -> Columns:
    """The columns without those for which the terminal is too narrow, with as much of the logs as there is room for.

    Args:
        columns: Name and cells of each.
        width: In characters.
    """
    room = 0
    for spared in ("", *_SPARED):
        columns = [column for column in columns if column[0] != spared]
        needed = [_LEAST.get(name) or max(map(len, (name, *cells))) for name, cells in columns]
        room = width - sum(needed) - _BETWEEN * (len(needed) + 1)
        if room >= 0:
            break
    # rich would take the room of a long line from all columns alike.
    most = _LEAST["log"] + max(0, room)
    return [(name, [cell[:most] for cell in cells] if name == "log" else cells) for name, cells in columns]
