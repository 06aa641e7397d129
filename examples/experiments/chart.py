"""What the pictures of the experiments share: style, figure, points with deviations, lines, and the PNG file."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart: https://jfly.uni-koeln.de/color/
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
MARKS = "osD^vP*X"
DASHES = ("-", "--", ":", "-.")
_STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E7EB",
    "axes.edgecolor": "#8A8F98",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 6,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside of it: the user's settings of matplotlib neither matter nor change."""
    import matplotlib

    # Figures without pyplot need no window; the context restores the user's settings.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(width: float, height: float, num_rows: int = 1, num_columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure of `width` x `height` inches that needs no window, and its axes as an array [row, column]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, **options)


def save(figure: Figure, path: Path) -> None:
    """Writes the PNG file. Through memory: only one rank calls it, and `savefig` to a path is shared by all ranks."""
    target = io.BytesIO()
    figure.savefig(target, format="png", metadata={"Software": None})  # The same picture from every version.
    path.write_bytes(target.getvalue())


def draw_points(axes: Axes, rows: Mapping[str, tuple[float, float]], colors: Sequence[str] = ()) -> None:
    """One line of the chart for each row: name -> (mean, deviation), from top to bottom."""
    for y, (mean, deviation) in enumerate(rows.values()):
        color = colors[y] if colors else COLORS[0]
        axes.errorbar(mean, y, xerr=deviation, fmt="o", color=color, capsize=4, markersize=6, lw=1.6)
        axes.annotate(f"{mean:.2f}", (mean, y), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.12)


def draw_lines(
    axes: Axes,
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    deviations: Mapping[str, Sequence[float]] | None = None,
    *,
    with_labels: bool = True,
) -> None:
    """One line for each name, told apart by colour, mark and dash, with error bars where deviations are given.

    Args:
        with_labels: False in all panels of a figure but one, so that its legend names each line once.
    """
    looks = itertools.product(DASHES, range(len(COLORS)))
    for number, ((name, values), (dash, color)) in enumerate(zip(lines.items(), looks, strict=False)):
        axes.errorbar(
            x[: len(values)],
            values,
            yerr=None if deviations is None else deviations[name],
            label=name if with_labels else None,
            color=COLORS[color],
            linestyle=dash,
            marker=MARKS[number % len(MARKS)],
            # Lines may lie on each other: later ones are smaller, so that all of them are seen.
            markersize=max(3.0, 8.0 - number),
            lw=max(1.0, 2.4 - 0.3 * number),
            capsize=3,
        )
