"""The table of `top`, by rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from unsloth_multigpu.overview import Look, columns_of, headline

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEFT = ("rank", "device", "doing", "log")
# These give way first where the terminal is narrow.
_CUT = ("device", "log")
_MUCH_WAITING = 0.3


def render(look: Look) -> RenderableType:
    """The run in one line, and below it a line for each rank."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(headline(look), style="bold")
    if not look.rows:
        return Group(head, Text("its ranks are starting"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = columns_of(look)
    for name, _ in columns:
        side: Literal["left", "right"] = "left" if name in _LEFT else "right"
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if name in _CUT else "fold"
        table.add_column(name, justify=side, no_wrap=name != "doing", overflow=overflow)
    for i, row in enumerate(look.rows):
        cells = []
        for name, values in columns:
            waits = name == "waiting" and (row.rates.waiting or 0.0) > _MUCH_WAITING
            style = "bold red" if name == "doing" and row.is_stuck else "yellow" if waits else ""
            # Text, because a log may hold what rich would take for mark-up.
            cells.append(Text(values[i], style=style))
        table.add_row(*cells)
    return Group(head, table)
