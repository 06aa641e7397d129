"""The page of a benchmark: report.html, which holds its plots and needs no other file. Needs jinja2."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.tools.bench.strategy_arm import OURS, find_arm
from unsloth_multigpu.tools.bench.table import Table
from unsloth_multigpu.tools.html_page import render

_TEMPLATE = Path(__file__).with_name("page.html")
_CAPTIONS = {
    "accuracy_curves.png": "Accuracy and loss after each epoch of each strategy",
    "speed.png": "Tokens per second of each arm",
    "shares.png": "Padding and waiting of each arm",
    "steps.png": "Time of an optimizer step in each arm",
    "norms.png": "Gradient norm of each step, and its difference from one process",
}


def write_report(
    folder: Path, headline: Sequence[str], lines: Sequence[str], tables: Sequence[Table], plots: Mapping[str, bytes]
) -> Path:
    """Writes the page and its plots into `folder`, and returns the page.

    Args:
        headline: Sentences: what was measured, and last the result.
        lines: The conditions, `name: text` each.
        plots: File name -> PNG.
    """
    for name, png in plots.items():
        (folder / name).write_bytes(png)
    page = folder / "report.html"
    page.write_text(render_page(headline, lines, tables, plots), encoding="utf-8")
    return page


def render_page(
    headline: Sequence[str], lines: Sequence[str], tables: Sequence[Table], plots: Mapping[str, bytes]
) -> str:
    """The page as HTML, with the plots inside."""
    return render(
        _TEMPLATE,
        headline=headline,
        conditions=[(name, text) for name, _, text in (line.partition(": ") for line in lines)],
        tables=list(map(_table, tables)),
        plots=[{"png": base64.b64encode(png).decode(), "caption": _CAPTIONS[name]} for name, png in plots.items()],
    )


def _table(table: Table) -> dict[str, Any]:
    rows = [
        {
            "name": name,
            "text": find_arm(name).text,
            "is_ours": name.startswith(OURS),
            "cells": [_cell(*named) for named in zip(table.columns[1:], cells, strict=True)],
        }
        for name, *cells in table.rows
    ]
    return {"columns": table.columns, "rows": rows, "legend": table.legend}


def _cell(column: str, text: str) -> dict[str, str]:
    # The range under the median keeps the columns narrow.
    value, _, span = text.partition(" (")
    return {"column": column, "text": value, "span": span.removesuffix(")")}
