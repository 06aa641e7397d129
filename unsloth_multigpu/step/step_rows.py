"""Reads the rows of a step once, and collates them as in one process and as dealt to this rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from unsloth_multigpu.deal.deal import MicroBatch, Rows, Step, StepShape, collate_step
from unsloth_multigpu.group.random_state import draw_seed, seeded_draws


class NotPossibleError(Exception):
    """A step cannot be computed twice, for the reason in the argument."""


class StepRows:
    """The rows of a step. Both ways of collating start from the same state of data set and collator, by `begin_again`.

    Attributes:
        collator_draws: The collator draws random numbers, so another seed gives other batches.
        data_draws: The data set draws random numbers.
    """

    def __init__(self, dataset: Any, step: Step, seed: int, begin_again: Callable[[], None]) -> None:
        self._dataset = dataset
        self._samples = step.samples
        self._begin_again = begin_again
        self.sizes = tuple(step.sizes)
        self._pieces = [m.piece for m in step.micro_batches]
        self._seed = seed
        with seeded_draws(seed):
            self._rows = dataset.rows_of(step.samples)
        with seeded_draws(seed + 1):
            again = dataset.rows_of(step.samples[: self.sizes[0]])
        self.data_draws = not _is_equal(self._rows[: self.sizes[0]], again)
        self._batches: list[Any] | None = None
        self._mine: list[Rows] | None = None
        self.collator_draws = False

    def part(self, num_references: int, shape: StepShape | None) -> StepRows:
        """Returns the rows of the first `num_references` micro-batches, dealt as by `shape`; None = not dealt."""
        if num_references == len(self.sizes):
            return self
        found = copy.copy(self)
        found.sizes = self.sizes[:num_references]
        found._batches = found._mine = None
        if shape is not None:
            found._pieces = shape.pieces(found.sizes)
        return found

    def as_one_process(self) -> list[Any]:
        """Returns the micro-batches of one process, not yet on the device."""
        if self._batches is None:
            ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
            rows = [self._rows[end - n : end] for end, n in zip(ends, self.sizes, strict=True)]
            self._begin_again()
            self._batches = [self._collated(batch, draw_seed(self._seed, i)) for i, batch in enumerate(rows)]
            self.collator_draws = not _is_equal(self._batches[0], self._collated(rows[0], draw_seed(self._seed + 1, 0)))
        return [_copied(batch) for batch in self._batches]

    def _collated(self, rows: Rows, seed: int) -> Any:
        with seeded_draws(seed):
            return self._dataset.collate([_copied(row) for row in rows])

    def as_dealt(self) -> Step:
        """Returns this rank's part, not yet on the device."""
        whole = self.as_one_process()
        if self.collator_draws:
            micro_batches = [MicroBatch(_cut(whole, self.sizes, piece.positions), piece) for piece in self._pieces]
            return Step(micro_batches, self.sizes)
        self._begin_again()
        with seeded_draws(self._seed):
            if self._mine is None:
                self._mine = [self._looked_up(piece.positions) for piece in self._pieces]
            rows = _copied(self._mine)
            return collate_step(self._pieces, rows, self.sizes, self._dataset.collate)

    def _looked_up(self, positions: Sequence[int]) -> Rows:
        if self.data_draws:
            return [self._rows[p] for p in positions]
        found: Rows = self._dataset.rows_of([self._samples[p] for p in positions])
        return found


def _cut(whole: Sequence[Any], sizes: Sequence[int], positions: Sequence[int]) -> Any:
    """Returns rows of collated micro-batches. Collated alone, they would get other random numbers."""
    begin = 0
    for batch, size in zip(whole, sizes, strict=True):
        rows = [p - begin for p in positions if begin <= p < begin + size]
        if len(rows) == len(positions):
            return batch if len(rows) == size else _rows_of(batch, rows, size)
        begin += size
    raise NotPossibleError("the collator draws random numbers, and rows of several micro-batches are dealt together")


def _rows_of(batch: Any, rows: list[int], size: int) -> Any:
    if isinstance(batch, torch.Tensor) and batch.dim() and len(batch) == size:
        return batch[rows]
    if isinstance(batch, Mapping):
        return {name: _rows_of(value, rows, size) for name, value in batch.items()}
    if isinstance(batch, list) and len(batch) == size:
        return [batch[i] for i in rows]
    if isinstance(batch, (list, tuple)):
        return type(batch)(_rows_of(value, rows, size) for value in batch)
    return batch


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and all(_is_equal(value, other.get(name)) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if one is other or type(one) is not type(other):
        return True
    if hasattr(one, "tobytes"):  # An array or an image, whose repr is abbreviated or has an address.
        return bool(one.tobytes() == other.tobytes())
    return repr(one) == repr(other)


def _copied(value: Any) -> Any:
    """Returns a copy of rows or batches, which collators and losses may write to."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, MutableMapping):
        held = copy.copy(value)
        for name, each in list(value.items()):
            held[name] = _copied(each)
        return held
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return value
