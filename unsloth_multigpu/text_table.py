"""Tables as text: columns under each other for a terminal, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table in Markdown. The last line ends with a line break, too."""
    return "".join([_markdown_line(columns), "|" + "---|" * len(columns) + "\n", *map(_markdown_line, rows)])


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
