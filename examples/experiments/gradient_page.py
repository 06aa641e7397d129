"""The page and the pictures of gradient_sync.py. Each sentence of the verdict is chosen by the figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import chart
from gradient_result import DDP, Figures, figures_of, half_epoch, mean_at
from gradient_verdict import OfTasks, proofs, span, verdict

HEADER = """# Gradient synchronization: the strategies, and mistakes put back one at a time

Written by this command; each sentence is chosen by the figures. Four CPU ranks train the same model on the same
samples, one variant after the other. torch {torch}, {total_s:.0f} s.

```bash
{command}
```

[gradient_sync.json](gradient_sync.json) has every epoch of every seed. The tables show means over the seeds: training
*loss* of an epoch in nats, *accuracy* of rank 0 on the test set in %, optimizer *updates* of rank 0, *gradient norm* of
the first update as a multiple of DDP's. *Replica proof*: what comparing the ranks' weights
(`unsloth_multigpu/group/replicas.py`) says after each step of the first epoch and at the end of later ones.
"""


def page(results: dict[str, Any]) -> str:
    """The whole page as Markdown."""
    of_tasks = {name: figures_of(task) for name, task in results["tasks"].items()}
    parts = [HEADER.format(**results), "## Verdict", "\n".join(verdict(results, of_tasks))]
    parts += ["## Which mistake gives which symptom", "\n".join(_symptoms(results, of_tasks))]
    parts += [
        "## Distance of the weights from DDP's",
        "Relative, at the end, of rank 0's; in brackets between two ranks.",
    ]
    parts += ["\n".join(_ends(of_tasks))]
    for name, task in results["tasks"].items():
        settings = f"Learning rate {task['learning_rate']:g}, {task['num_epochs']} epochs"
        parts += [
            f"## {name}: {task['what']}",
            f"{settings}, {seeds(of_tasks[name][DDP])}.",
            f"![loss and accuracy by epoch](gradient_sync_{name}.png)",
        ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _symptoms(results: dict[str, Any], of_tasks: OfTasks) -> Iterator[str]:
    first = next(iter(of_tasks.values()))
    yield from _table(["mistake", "what is wrong"], ([f.label, f.what] for f in first.values() if f.kind == "mistake"))
    yield "\nLoss in the epoch of the heading, compared with DDP's of the same seed (first row):\n"
    middle = {name: half_epoch(task) for name, task in results["tasks"].items()}
    head = ["variant", *(f"{name}, epoch {middle[name]}" for name in of_tasks), "updates", "gradient norm", "proof"]
    yield from _table(head, ([*_halfway(of_tasks, name, middle)] for name, f in first.items()))


def _halfway(of_tasks: OfTasks, name: str, middle: dict[str, int]) -> Iterator[str]:
    """A row of the table of symptoms."""
    found = [figures[name] for figures in of_tasks.values()]
    yield found[0].label
    for (task, epoch), f in zip(middle.items(), found, strict=True):
        pace = "" if of_tasks[task][name].kind == "reference" else f", {f.pace}"
        yield f"{mean_at(f.losses, epoch):.3f}{pace}"
    yield span([f.update_ratio for f in found])
    yield span([f.norm_ratio for f in found])
    yield "-" if name == "one_process" else proofs(of_tasks, name)


def _ends(of_tasks: OfTasks) -> Iterator[str]:
    rows = (
        [f.label, *(_apart(figures[variant]) for figures in of_tasks.values())]
        for variant, f in next(iter(of_tasks.values())).items()
        if f.kind == "mistake"
    )
    yield from _table(["variant", *of_tasks], rows)


def _apart(f: Figures) -> str:
    return f"{f.distance_from_ddp:.1e}" + (f" ({f.divergence:.1e})" if f.divergence else "")


def _table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cells) + " |"


def seeds(f: Figures) -> str:
    """ "1 seed", "mean of 3 seeds"."""
    return f"mean of {len(f.losses)} seeds" if len(f.losses) > 1 else "1 seed"


def draw(task: dict[str, Any], path: Path) -> None:
    """Loss and accuracy by epoch: strategies, mistakes by which replicas drift apart, mistakes that keep them equal."""
    figures = figures_of(task)
    right = [f for f in figures.values() if f.kind in ("reference", "strategy")]
    groups = {
        "The strategies": right,
        "Mistakes: replicas drift apart": [figures[DDP], *(f for f in figures.values() if f.is_bug)],
        "Mistakes: replicas stay equal": [
            figures[DDP],
            *(f for f in figures.values() if f not in right and not f.is_bug),
        ],
    }
    epochs = range(1, task["num_epochs"] + 1)
    with chart.style():
        figure, axes = chart.new_figure(14, 9, 2, len(groups), sharex=True, sharey="row")
        for column, (title, members) in enumerate(groups.items()):
            loss = {f.label: [mean_at(f.losses, e) for e in epochs] for f in members}
            accuracy = {f.label: [100 * mean_at(f.accuracies, e) for e in epochs] for f in members}
            chart.draw_lines(axes[0, column], epochs, loss)
            chart.draw_lines(axes[1, column], epochs, accuracy, with_labels=False)
            axes[0, column].set_title(title)
            axes[1, column].set_xlabel("epoch")
            axes[1, column].legend(
                *axes[0, column].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0, -0.13)
            )
            axes[1, column].xaxis.get_major_locator().set_params(integer=True)
        # A run that fails would press the others together.
        axes[0, 0].set_ylim(top=1.05 * max(mean_at(figures[name].losses, 1) for name in (DDP, "no_broadcast")))
        axes[0, 0].set_ylabel("training loss of the epoch, nats")
        axes[1, 0].set_ylabel("test accuracy of rank 0, %")
        figure.suptitle(f"{task['what']}; {seeds(figures[DDP])}", fontsize=12)
        chart.save(figure, path)
