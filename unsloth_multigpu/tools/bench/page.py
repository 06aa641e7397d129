"""The page of a benchmark: report.html, which holds its plots and needs no other file."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from unsloth_multigpu.tools.bench.strategy_arm import OURS, find_arm
from unsloth_multigpu.tools.bench.table import Table

_CAPTIONS = {
    "accuracy_curves.png": "Accuracy and loss after each epoch of each strategy",
    "speed.png": "Tokens per second of each arm",
    "shares.png": "Padding and waiting of each arm",
    "steps.png": "Time of an optimizer step in each arm",
    "norms.png": "Gradient norm of each step, and its difference from one process",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>unsloth-multigpu bench</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.7rem; margin-bottom: 0 }}
h2 {{ font-size: 1.2rem; margin: 2.4rem 0 .6rem }}
p.date, p.legend {{ color: #59636e; margin: .2rem 0 }}
p.legend {{ font-size: .9rem }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 0 }}
dt {{ color: #59636e }}
dd {{ margin: 0 }}
div.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; white-space: nowrap }}
th, td {{ padding: .45rem .7rem; text-align: right; border-bottom: 1px solid #d9dee3 }}
th {{ color: #59636e; font-weight: 600 }}
th:first-child, td:first-child {{ text-align: left }}
tr.ours td {{ background: #eaf3f9 }}
td small {{ display: block; color: #59636e }}
img {{ width: 100%; max-width: 58rem; display: block; margin: .8rem 0 1.6rem }}
</style>
</head>
<body>
<h1>unsloth-multigpu bench</h1>
<p class="date">{date}</p>
<h2>Conditions</h2>
<dl>
{conditions}
</dl>
<h2>Results</h2>
{tables}
<h2>Plots</h2>
{plots}
</body>
</html>
"""
_TABLE = """<div class="wide"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table></div>
{legend}"""


def write_report(folder: Path, lines: Sequence[str], tables: Sequence[Table], plots: Mapping[str, bytes]) -> Path:
    """Writes the page and its plots into `folder`, and returns the page.

    Args:
        lines: The conditions, `name: text` each.
        plots: File name -> PNG.
    """
    for name, png in plots.items():
        (folder / name).write_bytes(png)
    page = folder / "report.html"
    page.write_text(render_page(lines, tables, plots), encoding="utf-8")
    return page


def render_page(lines: Sequence[str], tables: Sequence[Table], plots: Mapping[str, bytes]) -> str:
    """The page as HTML, with the plots inside."""
    facts = [line.partition(": ") for line in lines]
    images = [
        f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}" alt="{_CAPTIONS[name]}">'
        for name, png in plots.items()
    ]
    return _PAGE.format(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        conditions="\n".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, _, text in facts),
        tables="\n".join(map(_table, tables)),
        plots="\n".join(images),
    )


def _table(table: Table) -> str:
    return _TABLE.format(
        head="".join(f"<th>{html.escape(column)}</th>" for column in table.columns),
        rows="\n".join(map(_row, table.rows)),
        legend="\n".join(f'<p class="legend">{html.escape(line)}</p>' for line in table.legend),
    )


def _row(cells: Sequence[str]) -> str:
    name, *rest = cells
    # The range under the median keeps the columns narrow.
    values = [html.escape(cell).replace(" (", "<small>").replace(")", "</small>") for cell in rest]
    style = ' class="ours"' if name.startswith(OURS) else ""
    first = f"{html.escape(name)}<small>{html.escape(find_arm(name).text)}</small>"
    return f"<tr{style}>" + "".join(f"<td>{cell}</td>" for cell in [first, *values]) + "</tr>"
