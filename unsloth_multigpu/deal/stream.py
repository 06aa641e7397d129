"""Optimizer steps from a data set without random access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from unsloth_multigpu.deal.deal import Collate, Rows, Step, StepShape, collate_step
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.facts import plain_values
from unsloth_multigpu.group.random_state import draw_seed, seeded_draws
from unsloth_multigpu.wire.digest import digest_of


class StepStream(IterableDataset[Step]):
    """Yields optimizer steps of a stream. Every rank reads the complete stream and keeps its share.

    A pass may end with fewer micro-batches than a step has. If the data set has a length, they are a step of their own,
    as in one process. Otherwise Hugging Face's loop keeps their gradient until the first step of the next pass, which
    adds its own; each part has its own divisor. Here they are the `left_over` of that step. Those of the last pass are
    never computed. `reference` is the loader of one process, with a collator that returns the rows unchanged.
    """

    def __init__(self, reference: DataLoader[Any], shape: StepShape, collate: Collate) -> None:
        self._reference = reference
        self.shape = shape
        self.collate = collate
        self._epoch = 0
        self._num_skipped = 0
        self._next_epoch: int | None = None
        # Earlier passes, and what was yielded in this pass.
        self.cursor = {"epoch": 0, "steps": 0}
        self._left_over: Step | None = None
        # Digest of the first rows of all steps so far. It differs if ranks read different rows.
        self.digest = ""

    def __len__(self) -> int:
        """Returns the rows of a pass. TypeError if the data set has no length."""
        return len(self._reference.dataset)  # type: ignore[arg-type]

    def num_steps(self) -> int:
        """Returns the steps of a pass. TypeError if the data set has no length."""
        return -(-len(self._reference) // self.shape.num_accumulated)

    def go_on(self, cursor: Mapping[str, int], num_skipped: int) -> None:
        """Starts with the pass in which a checkpoint was written.

        Args:
            cursor: The cursor in the checkpoint.
            num_skipped: Items that the caller drops first. For a stream without a length these are all steps of the
                training, since the caller counts all passes as one.
        """
        length = self._num_micro_batches()
        if length is not None:
            # The caller counts passes itself, and calls `set_epoch`.
            num_skipped %= self.num_steps()
            if not num_skipped:
                return
        self._num_skipped = num_skipped
        # The caller's count of passes starts at 0 in each process.
        self._next_epoch = cursor["epoch"]
        self.cursor = dict(cursor)

    def __iter__(self) -> Iterator[Step]:
        if self._next_epoch is not None:
            self._epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
            self._reference.set_epoch(self._epoch)  # type: ignore[attr-defined]
        num_skipped, self._num_skipped = self._num_skipped, 0
        if num_skipped:
            self._left_over = None
        num_done = self.cursor["steps"] if num_skipped else 0
        for _ in range(num_skipped - num_done):
            yield _SKIPPED
        self.cursor = {"epoch": self._epoch, "steps": 0}
        length = self._num_micro_batches()
        batches = islice(self._reference, length)
        num_read = 0
        for step_index in count():
            batch = self._read(batches, step_index)
            num_read += len(batch)
            if len(batch) < self.shape.num_accumulated and num_read != length:
                self._keep(batch, step_index)
                return
            if not batch:
                return
            # Before collating, because a collator may change rows, and each rank collates other rows.
            self.digest = digest_of([self.digest, plain_values(batch[0][0])])
            self.cursor["steps"] += 1
            if step_index < num_done:
                yield _SKIPPED
                continue
            step = self._collated(batch, step_index)
            # In a resumed pass, the left-over belongs to a skipped step.
            step.left_over, self._left_over = self._left_over, None
            yield step

    def _read(self, batches: Iterator[Rows], step_index: int) -> list[Rows]:
        # Seeds of the loader's workers are drawn here as well, with the first batch.
        with seeded_draws(draw_seed(self.shape.seed, self._epoch, step_index)):
            return list(islice(batches, self.shape.num_accumulated))

    def _num_micro_batches(self) -> int | None:
        try:
            return len(self._reference)
        except TypeError:
            return None

    def _keep(self, micro_batches: list[Rows], step_index: int) -> None:
        """Keeps the rest of a pass of a stream without a length; raises SetupError if the pass had no step."""
        if not micro_batches:
            return
        if step_index == 0:
            raise SetupError(
                f"The stream ended after {len(micro_batches)} micro-batch(es), fewer than gradient_accumulation_steps="
                f"{self.shape.num_accumulated}: without a length, such a pass has no step and the training never ends.",
                hint=f"Set gradient_accumulation_steps={len(micro_batches)} or less, or give the data set a __len__.",
            )
        self._left_over = self._collated(micro_batches, step_index)

    def _collated(self, step: list[Rows], step_index: int) -> Step:
        rows = [row for batch in step for row in batch]
        sizes = [len(batch) for batch in step]
        pieces = self.shape.pieces(sizes)
        mine = [[rows[p] for p in piece.positions] for piece in pieces]
        # A collator may overwrite a column of a row with its result.
        kept = [dict(row) if type(row) is dict else row for row in rows]
        with seeded_draws(draw_seed(self.shape.rank_seed, self._epoch, step_index)):
            collated = collate_step(pieces, mine, sizes, self.collate)
        collated.samples = kept
        return collated

    def rows_of(self, rows: Sequence[Any]) -> Rows:
        """Returns the rows themselves, since a stream yields rows and not indices."""
        return list(rows)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, by which the stream shuffles. After `go_on`, passes count on from the checkpoint."""
        self._epoch = epoch
        self._reference.set_epoch(epoch)  # type: ignore[attr-defined]


_SKIPPED = Step([], ())
