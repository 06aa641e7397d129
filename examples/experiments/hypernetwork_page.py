"""The page, the figures as JSON and the picture of `hypernetwork.py`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chart
from hypernetwork_result import PAIRS, REPORT, WEIGHT_PAIRS, Results
from hypernetwork_training import NUM_SIGNALS

_CURVES = {"one 128": "one process, batch 128", "one 256": "one process, batch 256", "ddp": "DDP, 2 x 128"}
_COLUMNS = ("updates", "accuracy %")
_INTRODUCTION = f"""# Do two GPUs learn better than one?

A report trained a HyperNetwork classifier on one GPU ({REPORT[0]} %) and on two ({REPORT[1]} %), once each, and
proposed four experiments. Here they are, with controls: conditions differ in one thing, and runs with the same seed
begin with the same weights and see the samples in the same order. Each generated layer has a learnable signal of
{NUM_SIGNALS} numbers, from which one shared generator makes its weights. Adam, constant learning rate. Each sentence is
chosen by the figures of this run; hypernetwork.json beside this page has all of them, seed by seed.
"""


def to_markdown(results: Sequence[Results], facts: Mapping[str, str]) -> str:
    """The page. Figures that repeat when the command is run again; so no times."""
    parts = [
        _INTRODUCTION,
        f"```bash\n{facts['command']}\n```\n",
        f"Python {facts['python']}, torch {facts['torch']}, 2 CPU ranks over gloo.\n",
        "![Accuracy of each condition, and over learning rates](hypernetwork.png)\n",
    ]
    for number, result in enumerate(results):
        parts += [_headline(result), _conclusion(result, is_short=number > 0)]
    return "\n".join([*parts, "## Accuracy\n", _arm_table(results), _sweep_table(results)])


def to_json(results: Sequence[Results], facts: Mapping[str, str]) -> str:
    """All runs and what was computed from them."""
    return (
        json.dumps({**facts, "tasks": {result.task.name: _task_facts(result) for result in results}}, indent=1) + "\n"
    )


def draw(results: Sequence[Results], path: Path) -> None:
    """For each task: accuracy of each condition, and accuracy over learning rates."""
    with chart.style():
        figure, panels = chart.new_figure(12, 4.6 * len(results), len(results), 2, width_ratios=(1.15, 1))
        for result, (left, right) in zip(results, panels, strict=True):
            rows = {arm: result.mean_and_std(arm) for arm in _main_arms(result)}
            chart.draw_points(left, rows, [_color(result, arm) for arm in rows])
            left.set_title(f"{result.task.name}: learning rate {result.task.learning_rate:g}")
            left.set_xlabel(f"test accuracy in %, mean and deviation of {len(result.runs['ddp'])} seeds")
            _draw_sweep(result, right)
        chart.save(figure, path)


def _color(result: Results, name: str) -> str:
    """As the curves: batch 128, batch 256 in one piece, and in two parts."""
    arm = next(arm for arm in result.arms if arm.name == name)
    return chart.COLORS[2 if arm.num_parts == 2 else 1 if arm.batch_size == 256 else 0]


def _draw_sweep(result: Results, axes: Any) -> None:
    factors = result.task.factors
    points = {
        text: [result.mean_and_std(result.swept(arm, factor)) for factor in factors] for arm, text in _CURVES.items()
    }
    means, deviations = ({text: [point[i] for point in row] for text, row in points.items()} for i in (0, 1))
    chart.draw_lines(axes, [result.learning_rate(factor) for factor in factors], means, deviations)
    axes.set_xscale("log")
    axes.set_title(f"{result.task.name}: over learning rates")
    axes.set_xlabel("learning rate of Adam")
    axes.set_ylabel("test accuracy in %")
    axes.legend(loc="best")


def _main_arms(result: Results) -> list[str]:
    """The conditions, and twice the rate at batch 256; the rest of the sweep has a table of its own."""
    doubled = {"ddp, lr x 2", "one 256, lr x 2"}
    return [arm.name for arm in result.arms if arm.factor == 1 or arm.name in doubled]


def _headline(result: Results) -> str:
    task = result.task
    what = "next of {} characters from the 8 before" if task.num_symbols else "{} digits of 8 x 8 pixels"
    return (
        f"## {task.name}\n\n{what.format(task.num_classes).capitalize()}: {len(task.train[1])} samples to train on, "
        f"{len(task.test[1])} to test; {task.num_epochs} epochs, {len(result.runs['ddp'])} seeds, "
        f"{len(result.runs['ddp'][0].weights)} weights.\n"
    )


def _conclusion(result: Results, *, is_short: bool) -> str:
    """All sentences, or the first one of each item; the JSON has all of every task."""
    return (
        "\n".join(f"- {line.partition('. ')[0].rstrip('.') + '.' if is_short else line}" for line in result.conclusion)
        + "\n"
    )


def _arm_table(results: Sequence[Results]) -> str:
    head = ["name", "condition", *(f"{result.task.name}: {what}" for result in results for what in _COLUMNS)]
    texts = {arm.name: arm.text for arm in results[0].arms}
    rows = [
        [name, texts[name], *(cell for result in results for cell in _arm_cells(result, name))]
        for name in _main_arms(results[0])
    ]
    rate = f"learning rate {results[0].task.learning_rate:g}"  # All tasks have one, and the same sweep.
    return f"Mean and deviation (n - 1) over seeds, {rate}:\n\n{_table(head, rows)}"


def _arm_cells(result: Results, name: str) -> tuple[str, str]:
    """Under the heads `_COLUMNS`."""
    return str(result.runs[name][0].num_updates), _pm(result, name, "accuracy", 2)


def _sweep_table(results: Sequence[Results]) -> str:
    rows = [
        [
            f"{results[0].learning_rate(factor):g}",
            *(_pm(result, result.swept(arm, factor), "accuracy", 2) for result in results for arm in _CURVES),
        ]
        for factor in results[0].task.factors
    ]
    head = ["learning rate", *(f"{result.task.name}: {text}" for result in results for text in _CURVES.values())]
    return f"Over learning rates, %:\n\n{_table(head, rows)}"


def _pm(result: Results, arm: str, field: str, digits: int) -> str:
    mean, std = result.mean_and_std(arm, field)
    return f"{mean:.{digits}f} +- {std:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _task_facts(result: Results) -> dict[str, Any]:
    fields = ("accuracy", "test_loss", "signal_low", "signal_high", "signal_std")
    arms = {}
    for arm in result.arms:
        runs = result.runs[arm.name]
        arms[arm.name] = {
            "text": arm.text,
            "learning_rate": runs[0].learning_rate,
            "num_updates": runs[0].num_updates,
            **{field: _figures(result, arm.name, field) for field in fields},
        }
    return {
        "num_train": len(result.task.train[1]),
        "num_test": len(result.task.test[1]),
        "num_epochs": result.task.num_epochs,
        "arms": arms,
        "differences": {f"{a} - {b}": dataclasses.asdict(result.difference(a, b)) for a, b in PAIRS},
        "max_weight_difference": {f"{a} - {b}": result.weight_gap(a, b) for a, b in WEIGHT_PAIRS},
        "conclusion": result.conclusion,
    }


def _figures(result: Results, arm: str, field: str) -> dict[str, Any]:
    mean, std = result.mean_and_std(arm, field)
    return {"mean": mean, "std": std, "seeds": result.values(arm, field)}
