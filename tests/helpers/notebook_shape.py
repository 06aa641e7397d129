"""The arguments of Unsloth's published notebooks, see notebook_shapes.tsv."""

from __future__ import annotations

import csv
from pathlib import Path


def notebook_shapes() -> list[tuple[str, int, int, int]]:
    """Trainer, samples of a micro-batch, micro-batches of a step, completions of a prompt; its default if not given."""
    with Path(__file__).with_name("notebook_shapes.tsv").open() as file:
        rows = list(csv.DictReader(filter(lambda line: not line.startswith("#"), file), delimiter="\t"))
    defaults = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8}
    return [(row["trainer"], *(int(row[name] or default) for name, default in defaults.items())) for row in rows]
