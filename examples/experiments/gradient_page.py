"""The page and the pictures of gradient_sync.py. Each sentence of the verdict is chosen by the figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chart
from gradient_result import DDP, Figures, figures_of, half_epoch, mean_at
from gradient_verdict import OfTasks, proofs, span, verdict

HEADER = """# How gradients meet: the strategies, and mistakes put back one at a time

Written by the command below; no figure or sentence is by hand. Four CPU ranks train the same model on the same samples,
one variant after the other.

```bash
{command}
```

torch {torch}, {total_s:.0f} s. The columns of the tables, means over the seeds:

- *loss* of the training steps of an epoch, in nats; *accuracy* of rank 0 on the test set, in %;
- *updates*: steps of the optimizer on rank 0;
- *gradient norm* of the first update, in parts of DDP's;
- *cosine* between the ranks' own gradients before the first step;
- *ranks apart*: the largest |w_rank - w_0| / |w_0| at the end; *from DDP*: the same for rank 0 and DDP's weights;
- *replica proof*: what `unsloth_multigpu/group/replicas.py` says after every step of the first epoch and, where it has
  found nothing, at the end of each later one.
"""


def page(results: dict[str, Any]) -> str:
    """The whole page as Markdown."""
    of_tasks = {name: figures_of(task) for name, task in results["tasks"].items()}
    parts = [HEADER.format(**results), "## Verdict", "\n".join(verdict(results, of_tasks))]
    parts += ["## Which mistake gives which symptom", "\n".join(_symptoms(results, of_tasks))]
    for name, task in results["tasks"].items():
        settings = f"Learning rate {task['learning_rate']:g}, {task['num_epochs']} epochs"
        parts += [
            f"## {name}: {task['what']}",
            f"{settings}, {seeds(of_tasks[name][DDP])}.",
            "\n".join(_table(task, of_tasks[name])),
            f"![loss and accuracy by epoch](gradient_sync_{name}.png)",
        ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(task: dict[str, Any], figures: dict[str, Figures]) -> Iterator[str]:
    epochs = list(dict.fromkeys([1, half_epoch(task), task["num_epochs"]]))
    names = [
        "variant",
        "updates",
        *(f"loss {e}" for e in epochs),
        *(f"accuracy {e}" for e in epochs),
        *("gradient norm", "cosine", "ranks apart", "from DDP", "replica proof"),
    ]
    yield _row(names)
    yield _row(["---"] + ["---:"] * (len(names) - 2) + ["---"])
    for f in figures.values():
        yield _row(
            [
                f.label,
                _updates(f),
                *(f"{mean_at(f.losses, e):.3f}" for e in epochs),
                *(f"{100 * mean_at(f.accuracies, e):.1f}" for e in epochs),
                f"{f.norm_ratio:.3f}",
                "-" if f.cosine is None else f"{f.cosine:.2f}",
                f"{f.divergence:.1e}" if f.divergence else "0",
                f"{f.distance_from_ddp:.1e}" if f.distance_from_ddp else "0",
                f.proof,
            ]
        )


def _updates(f: Figures) -> str:
    # Ranks that never step get their weights from rank 0; one that steps less often does not.
    fewer = {f"rank {rank}: {n}" for rank, n in enumerate(f.num_updates) if 0 < n < f.num_updates[0]}
    return str(f.num_updates[0]) + (f" ({', '.join(sorted(fewer))})" if fewer else "")


def _symptoms(results: dict[str, Any], of_tasks: OfTasks) -> Iterator[str]:
    first = next(iter(of_tasks.values()))
    middle = {name: half_epoch(task) for name, task in results["tasks"].items()}
    yield from (f"- **{f.label}**: {f.what}" for f in first.values() if f.kind == "mistake")
    yield "\nLoss against DDP's with the same seed, in the epoch of the heading; in brackets DDP's.\n"
    yield _row(
        ["variant", *(f"{name}, epoch {middle[name]}" for name in of_tasks), "updates", "gradient norm", "proof"]
    )
    yield _row(["---"] * (len(of_tasks) + 4))
    for name, f in first.items():
        if f.kind != "reference":
            cells = [_cell(figures[name], figures[DDP], middle[task]) for task, figures in of_tasks.items()]
            norms = [figures[name].norm_ratio for figures in of_tasks.values()]
            updates = [figures[name].update_ratio for figures in of_tasks.values()]
            yield _row([f.label, *cells, span(updates), span(norms), proofs(of_tasks, name)])


def _cell(f: Figures, ddp: Figures, epoch: int) -> str:
    return f"{f.pace}: {mean_at(f.losses, epoch):.3f} ({mean_at(ddp.losses, epoch):.3f})"


def seeds(f: Figures) -> str:
    """ "1 seed", "mean of 3 seeds"."""
    return f"mean of {len(f.losses)} seeds" if len(f.losses) > 1 else "1 seed"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


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
