"""What each strategy has learned after each epoch, as a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unsloth_multigpu.tools.bench.plot import LINES, MARKS, house_style, new_figure, png_of
from unsloth_multigpu.tools.bench.result import Spread
from unsloth_multigpu.tools.bench.strategy_result import StrategyResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the space between two epochs: strategies that learn the same stand side by side there.
_DODGE = 0.07


def draw_curves(results: Sequence[StrategyResult]) -> dict[str, bytes]:
    """Draws accuracy_curves.png: file name -> PNG."""
    from matplotlib.ticker import PercentFormatter

    num_epochs = len(results[0].accuracies)
    with house_style():
        figure, panels = new_figure(11.0, rows=3)
        for number, r in enumerate(results):
            shift = _DODGE * (number - (len(results) - 1) / 2)
            for axes, spreads in zip(panels, (r.accuracies, r.test_losses, r.train_losses), strict=True):
                _curve(axes, number, [epoch + shift for epoch in range(1, num_epochs + 1)], spreads, r.name)
        titles = ("Accuracy of the next byte, test", "Loss, test", "Loss, mean over the epoch's steps")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
        panels[-1].set_xlim(0.5, num_epochs + 0.5)
        panels[-1].set_xticks(range(1, num_epochs + 1))
        panels[-1].set_xlabel("epoch; side by side the strategies, medians of the rounds with smallest and largest")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return {"accuracy_curves.png": png_of(figure)}


def _curve(axes: Axes, number: int, places: Sequence[float], spreads: Sequence[Spread], label: str) -> None:
    axes.errorbar(
        places,
        [s.median for s in spreads],
        yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
        color=LINES[number % len(LINES)],
        marker=MARKS[number % len(MARKS)],
        markersize=8,
        linewidth=1.2,
        linestyle="-" if number < len(LINES) else "--",
        capsize=3,
        label=label,
    )
