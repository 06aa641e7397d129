"""Step time and efficiency against the number of GPUs, as a PNG file. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unsloth_multigpu.step.advice import USEFUL
from unsloth_multigpu.step.forecast import MOST_RANKS, TimeForecast
from unsloth_multigpu.tools.plot_style import BLUE, GREEN, GREY, ORANGE, house_style, new_figure, png_of

_SHARES = (("computing", BLUE), ("waiting", GREEN), ("link", ORANGE), ("update", "#CC79A7"))


def draw(rows: Sequence[TimeForecast], useful: int, most: int | None) -> bytes:
    """Draws the page's plot.

    Args:
        rows: From one rank on, see `forecast.curve`.
        useful: The limit that the advice names.
        most: More GPUs than that are refused; None = none of the numbers is.
    """
    with house_style():
        figure, (above, middle, below) = new_figure(10.0, rows=3)
        _times(above, rows)
        _efficiency(middle, rows)
        _shares(below, rows)
        for axes in (above, middle, below):
            _limits(axes, useful, most)
        below.set_xscale("log", base=2)
        below.set_xlim(0.9, MOST_RANKS * 1.15)
        ticks = [2**k for k in range(11)]
        below.set_xticks(ticks, [f"{n:,}" for n in ticks])
        below.set_xlabel("GPUs")
        return png_of(figure)


def _times(axes: Any, rows: Sequence[TimeForecast]) -> None:
    numbers = [row.num_ranks for row in rows]
    # For as many samples as one process has in a step: with global_batch="scale" a step has more.
    seconds = [rows[0].step_s / row.speed_up for row in rows]
    axes.plot(numbers, [seconds[0] / n for n in numbers], color=GREY, linestyle="--", label="one GPU / N")
    axes.plot(numbers, seconds, color=BLUE, marker="o", markersize=5, label="forecast")
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.set_title("Seconds for the samples of one step")
    axes.legend(loc="lower left")


def _efficiency(axes: Any, rows: Sequence[TimeForecast]) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.plot([r.num_ranks for r in rows], [r.efficiency for r in rows], color=BLUE, marker="o", markersize=5)
    axes.axhline(USEFUL, color=GREY, linestyle=":")
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("Efficiency: what each GPU does, of what one alone does")


def _shares(axes: Any, rows: Sequence[TimeForecast]) -> None:
    from matplotlib.ticker import PercentFormatter

    shares = [[getattr(row, name) for row in rows] for name, _ in _SHARES]
    names, colors = zip(*_SHARES, strict=True)
    axes.stackplot([row.num_ranks for row in rows], shares, labels=names, colors=colors, alpha=0.85)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("Where the GPUs' time goes")
    axes.legend(loc="lower left", ncols=4, frameon=True)


def _limits(axes: Any, useful: int, most: int | None) -> None:
    axes.axvline(useful, color="black", linewidth=1.2)
    place = {"xycoords": axes.get_xaxis_transform(), "fontsize": 9.5, "va": "top", "textcoords": "offset points"}
    is_right = useful <= MOST_RANKS / 8
    axes.annotate(
        f"useful up to {useful:,}",
        (useful, 1.0),
        (5 if is_right else -5, -3),
        ha="left" if is_right else "right",
        **place,
    )
    if most is not None:
        axes.axvspan(most, MOST_RANKS * 2, color=GREY, alpha=0.15, linewidth=0)
        if most < MOST_RANKS / 2:
            axes.annotate("refused: fewer samples than GPUs", (most, 0.55), (6, 0), **place)
