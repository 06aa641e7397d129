"""Whole optimizer steps of a data set without random access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from unsloth_multigpu.data.draw import draw_seed, seeded_draws
from unsloth_multigpu.data.step import Collate, Rows, Step, StepShape, collate_step


class StepStream(IterableDataset[Step]):
    """Whole steps of a data set without random access: every rank reads the whole stream and keeps its share.

    Args:
        reference: Loader of the one-process run whose collator returns the rows as they are.
        shape: How rows are dealt.
        collate: The Trainer's collator.
    """

    def __init__(self, reference: DataLoader[Any], shape: StepShape, collate: Collate) -> None:
        self._reference = reference
        self._shape = shape
        self._collate = collate
        self._epoch = 0
        self._num_skipped = 0
        self._next_epoch: int | None = None
        self._cursor = {"epoch": 0, "steps": 0, "samples": 0}

    def cursor(self) -> dict[str, int]:
        """How often the stream was read before, and how many "steps" and "samples" of this pass were given out."""
        return dict(self._cursor)

    def go_on(self, cursor: Mapping[str, int], num_skipped: int) -> None:
        """Lets the first pass be the one that a checkpoint was written in.

        Args:
            cursor: Of the checkpoint.
            num_skipped: Items that the caller drops before it takes one: all steps of the training, where it counts
                a stream that was read several times as one.
        """
        self._num_skipped = num_skipped
        # The caller's own count begins again with each process.
        self._next_epoch = cursor["epoch"]
        self._cursor = dict(cursor)

    def __iter__(self) -> Iterator[Step]:
        if self._next_epoch is not None:
            self._epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
            self._reference.set_epoch(self._epoch)  # type: ignore[attr-defined]
        num_skipped, self._num_skipped = self._num_skipped, 0
        num_done = self._cursor["steps"] if num_skipped else 0
        for _ in range(num_skipped - num_done):
            yield _SKIPPED
        self._cursor = {"epoch": self._epoch, "steps": 0, "samples": 0}
        batches = iter(self._reference)
        for number in count():
            # Seeds of the loader's workers are drawn here as well, with the first batch.
            with seeded_draws(draw_seed(self._shape.seed, self._epoch, number)):
                step = list(islice(batches, self._shape.num_accumulated))
            if not step:
                return
            self._cursor["steps"] += 1
            self._cursor["samples"] += sum(len(batch) for batch in step)
            yield _SKIPPED if number < num_done else self._collated(step, number)

    def _collated(self, step: list[Rows], number: int) -> Step:
        rows = [row for batch in step for row in batch]
        pieces = self._shape.in_order([len(batch) for batch in step])
        mine = [[rows[p] for p in piece.positions] for piece in pieces]
        with seeded_draws(draw_seed(self._shape.rank_seed, self._epoch, number)):
            return collate_step(pieces, mine, len(step), self._collate, self._shape.regroup)

    def set_epoch(self, epoch: int) -> None:
        """Lets the stream shuffle for `epoch`; not after `go_on`, which knows better."""
        self._epoch = epoch
        self._reference.set_epoch(epoch)  # type: ignore[attr-defined]


_SKIPPED = Step([], 0)
