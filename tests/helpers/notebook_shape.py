"""The arguments of Unsloth's published notebooks, see notebook_shapes.tsv."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple


class NotebookShape(NamedTuple):
    """What a notebook gives its trainer; where it gives nothing, the trainer's default.

    Args:
        trainer: Its class.
        batch: Samples of a micro-batch.
        accumulation: Micro-batches of a step.
        num_generations: Completions of a prompt, for GRPO.
    """

    trainer: str
    batch: int
    accumulation: int
    num_generations: int


def notebook_shapes() -> list[NotebookShape]:
    """One shape for each row of the table."""
    with Path(__file__).with_name("notebook_shapes.tsv").open() as file:
        rows = list(csv.DictReader(filter(lambda line: not line.startswith("#"), file), delimiter="\t"))
    return [
        NotebookShape(
            row["trainer"],
            int(row["per_device_train_batch_size"] or 8),
            int(row["gradient_accumulation_steps"] or 1),
            int(row["num_generations"] or 8),
        )
        for row in rows
    ]
