"""The plots of a benchmark, as PNG files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unsloth_multigpu.tools.bench.arm import BASELINE, REFERENCE
from unsloth_multigpu.tools.bench.headline import NORM_BOUNDS, ROUNDINGS
from unsloth_multigpu.tools.bench.result import ArmResult, RankRecord, Runs, Spread, measure_run
from unsloth_multigpu.tools.bench.strategy_arm import OURS
from unsloth_multigpu.tools.bench.strategy_result import StrategyResult
from unsloth_multigpu.tools.plot_style import BLUE, GREEN, GREY, ORANGE, house_style, new_figure, png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#8A8F98")
_MARKS = "osD^vP*X<"
# Where equal norms are drawn: below what fp32 can tell apart.
_NO_DIFFERENCE = 1e-9


def draw_plots(results: Sequence[ArmResult], runs: Runs, num_warmup: int, dtype: str) -> dict[str, bytes]:
    """Draws every plot: file name -> PNG.

    Args:
        runs: `runs[arm][round]` = records of the ranks.
        num_warmup: Steps that are not timed.
        dtype: "fp32" or "bf16", which decides what rounding is.
    """
    with house_style():
        figures = {
            "speed.png": _speed(results),
            "shares.png": _shares(results),
            "steps.png": _steps(runs, num_warmup),
            "norms.png": _norms(results, runs, dtype),
        }
        return {name: png_of(figure) for name, figure in figures.items()}


def draw_curves(results: Sequence[StrategyResult]) -> dict[str, bytes]:
    """Draws accuracy_curves.png: file name -> PNG."""
    from matplotlib.ticker import PercentFormatter

    num_epochs = len(results[0].accuracies)
    with house_style():
        figure, panels = new_figure(11.0, rows=3)
        for index, r in enumerate(results):
            for axes, spreads in zip(panels, (r.accuracies, r.test_losses, r.train_losses), strict=True):
                _curve(axes, index, range(1, num_epochs + 1), spreads, r.name)
        titles = ("Accuracy of the next byte, test", "Loss, test", "Loss, mean over the epoch's steps")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
        panels[-1].set_xlim(0.5, num_epochs + 0.5)
        panels[-1].set_xticks(range(1, num_epochs + 1))
        panels[-1].set_xlabel(
            "epoch; medians of the rounds with smallest and largest; curves of equal strategies overlap"
        )
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return {"accuracy_curves.png": png_of(figure)}


def _speed(results: Sequence[ArmResult]) -> Figure:
    figure, axes = new_figure(1.3 + 0.5 * len(results))
    _name_rows(axes, [r.name for r in results])
    for row, r in enumerate(results):
        speed = r.tokens_per_s
        below, above = speed.median - speed.low, speed.high - speed.median
        color = BLUE if r.name.startswith(OURS) else GREY
        axes.barh(row, speed.median, height=0.62, color=color)
        axes.errorbar(speed.median, row, xerr=[[below], [above]], color="black", capsize=4, lw=1.2)
        axes.annotate(_speed_label(r), (speed.high, row), (8, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.45 * max(r.tokens_per_s.high for r in results))  # Room for the labels.
    axes.set_xlabel("tokens per second, padding not counted; the line spans smallest to largest")
    axes.set_title("Speed")
    return figure


def _speed_label(result: ArmResult) -> str:
    named = ((BASELINE, result.times_baseline), (REFERENCE, result.times_reference))
    times = [f"{ratio.median:.2f}x {name}" for name, ratio in named if ratio is not None and name != result.name]
    return "  ".join([f"{result.tokens_per_s.median:,.0f}", *times[:1]])


def _shares(results: Sequence[ArmResult]) -> Figure:
    figure, axes = new_figure(1.5 + 0.62 * len(results))
    _name_rows(axes, [r.name for r in results])
    height = 0.36
    parts = (
        ("padding: part of the computed tokens", ORANGE, -height / 2, [r.padding_share for r in results]),
        ("waiting: part of the ranks' time", GREEN, height / 2, [r.waiting_share for r in results]),
    )
    largest = max(share.high for _, _, _, shares in parts for share in shares)
    for label, color, offset, shares in parts:
        rows = [row + offset for row in range(len(shares))]
        axes.barh(rows, [100 * s.median for s in shares], height=height, color=color, label=label)
        for row, share in zip(rows, shares, strict=True):
            place = (100 * share.median, row)
            axes.annotate(f"{share.median:.1%}", place, (5, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_xlim(0, max(1.0, 100 * largest) * 1.15)
    axes.set_xlabel("percent")
    axes.set_title("What is lost")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _steps(runs: Runs, num_warmup: int) -> Figure:
    figure, axes = new_figure(1.5 + 0.5 * len(runs))
    _name_rows(axes, list(runs))
    times = [[s for ranks in rounds for s in measure_run(ranks, num_warmup).step_s] for rounds in runs.values()]
    axes.boxplot(
        times,
        positions=range(len(times)),
        orientation="horizontal",
        widths=0.55,
        whis=(0, 100),
        manage_ticks=False,
        patch_artist=True,
        boxprops={"facecolor": "#CFE3F1", "edgecolor": BLUE},
        medianprops={"color": "black", "linewidth": 1.6},
    )
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of an optimizer step, all rounds; the box holds the middle half")
    axes.set_title("Step times")
    return figure


def _norms(results: Sequence[ArmResult], runs: Runs, dtype: str) -> Figure:
    # Two panels where there is a run to compare with.
    compared = [r.name for r in results if r.norm_difference is not None and r.name != REFERENCE]
    figure, drawn = new_figure(6.4 if compared else 3.8, rows=2 if compared else 1)
    above = drawn[0] if compared else drawn
    for index, (name, rounds) in enumerate(runs.items()):
        if _norms_of(rounds[0]):
            _norm_line(above, index, _norms_of(rounds[0]), name)
    above.set_ylabel("gradient norm")
    above.set_title("Gradient norms, first round")
    lowest = above
    if compared:
        lowest, reference = drawn[1], _norms_of(runs[REFERENCE][0])
        for index, (name, rounds) in enumerate(runs.items()):
            if name in compared:
                pairs = zip(_norms_of(rounds[0]), reference, strict=True)
                # A logarithmic axis has no zero.
                differences = [max(abs(m - o) / (abs(o) or 1.0), _NO_DIFFERENCE) for m, o in pairs]
                _norm_line(lowest, index, differences, None, linestyle="none")
        lowest.set_yscale("log")
        _draw_bounds(lowest, dtype)
        lowest.set_ylabel(f"relative difference\nfrom {REFERENCE}\n({_NO_DIFFERENCE:.0e} = none)")
    lowest.xaxis.get_major_locator().set_params(integer=True)
    lowest.set_xlabel("optimizer step")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _draw_bounds(axes: Axes, dtype: str) -> None:
    """Lines for one rounding and for what many of them may add up to: without them a small difference looks large."""
    bound, rounding = NORM_BOUNDS[dtype], ROUNDINGS[dtype]
    axes.axhspan(_NO_DIFFERENCE / 2, bound, color="#EAF3F9", zorder=0)
    for height, text in ((bound, f"bound of equal training, {bound:.0e}"), (rounding, f"one rounding of {dtype}")):
        axes.axhline(height, color=GREY, linewidth=1.2, linestyle="--", zorder=1)
        axes.annotate(
            text,
            (1.0, height),
            (-2, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            color="#59636e",
            fontsize=9,
        )
    axes.set_ylim(_NO_DIFFERENCE / 2, max(10 * bound, axes.get_ylim()[1]))


def _norms_of(ranks: Sequence[RankRecord]) -> Sequence[float]:
    return ranks[0].gradient_norms


def _norm_line(axes: Axes, index: int, values: Sequence[float], label: str | None, linestyle: str = "-") -> None:
    # Equal lines lie on each other: each is drawn smaller than the one before, so that all are visible.
    axes.plot(
        range(1, len(values) + 1),
        values,
        color=_LINES[index % len(_LINES)],
        marker=_MARKS[index % len(_MARKS)],
        markersize=max(3, 10 - index),
        linewidth=max(1.0, 3.4 - 0.4 * index),
        linestyle=linestyle,
        label=label,
    )


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _curve(axes: Axes, index: int, places: Sequence[float], spreads: Sequence[Spread], label: str) -> None:
    axes.errorbar(
        places,
        [s.median for s in spreads],
        yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
        color=_LINES[index % len(_LINES)],
        marker=_MARKS[index % len(_MARKS)],
        # As in `_norm_line`.
        markersize=max(3.0, 20 - 2.2 * index),
        linewidth=max(1.0, 4.2 - 0.4 * index),
        linestyle="-" if index < len(_LINES) else "--",
        capsize=3,
        label=label,
    )
