"""How plots of the experiments look. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart: https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#8A8F98"
_WIDTH = 9.0
_STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E7EB",
    "axes.edgecolor": GREY,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "legend.frameon": False,
}


@contextmanager
def house_style() -> Iterator[None]:
    """How plots look while this is open."""
    import matplotlib

    # Figures without pyplot need no window; the context restores the user's settings.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(height: float, rows: int = 1) -> tuple[Figure, Any]:
    """A figure of the page's width, and its axes, one above the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")
    return figure, figure.subplots(rows, 1, sharex=rows > 1)


def png_of(figure: Figure) -> bytes:
    """The content of a PNG file."""
    target = io.BytesIO()
    figure.savefig(target, format="png", metadata={"Software": None})  # The same picture from every version.
    return target.getvalue()
