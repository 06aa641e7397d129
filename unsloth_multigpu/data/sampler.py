"""A data loader whose every item is one optimizer step of this rank.

The order of samples is the one-process run's own: the Trainer's sampler draws it on rank 0, the others receive it.
Because one item is one step, ranks may do different numbers of micro-batches, and resuming in the middle of an epoch
skips steps, whatever the number of ranks was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from unsloth_multigpu.data.deal import Piece, deal_step

Rows = list[Any]
Collate = Callable[[Rows], Any]


class BroadcastOrder(Protocol):
    """Gives every rank what rank 0 passes in."""

    def __call__(self, batches: Iterable[Sequence[int]]) -> list[list[int]]: ...


class StepPlanner(Protocol):
    """Plans a step of the samples with these indices; None where it is to be dealt in order."""

    def __call__(self, samples: Sequence[int], sizes: Sequence[int]) -> list[list[Piece]] | None: ...


@dataclass(frozen=True)
class StepShape:
    """How the samples of a step are dealt.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        num_accumulated: Micro-batches of one step of the one-process run.
        regroup: See `deal_step`.
        planner: Deals steps whose samples it knows by their lengths.
    """

    rank: int
    world_size: int
    num_accumulated: int
    regroup: bool
    planner: StepPlanner

    def pieces(self, sizes: Sequence[int], samples: Sequence[int] | None = None) -> list[Piece]:
        """This rank's pieces of a step; `samples` are its indices in a data set with random access."""
        plan = None if samples is None else self.planner(samples, sizes)
        return (plan or deal_step(sizes, self.world_size, regroup=self.regroup))[self.rank]


class MicroBatch:
    """Collated inputs of one forward-backward pass with the piece of the plan that they are."""

    def __init__(self, inputs: Any, piece: Piece) -> None:
        self.inputs = inputs
        self.piece = piece
        self.share = piece.share
        self.num_labels = 0

    def pin_memory(self) -> MicroBatch:
        """Called by torch's loader for page-locked copies."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return MicroBatch(pin_memory(self.inputs), self.piece)


class Step:
    """This rank's micro-batches of one optimizer step.

    Indexed by a key it gives all its values in one flat tensor: the Trainer counts tokens that way. It is no Mapping,
    of which torch's loader would make a dict.
    """

    def __init__(self, micro_batches: list[MicroBatch], num_references: int) -> None:
        self.micro_batches = micro_batches
        self.num_references = num_references

    def pin_memory(self) -> Step:
        """Called by torch's loader for page-locked copies."""
        return Step([m.pin_memory() for m in self.micro_batches], self.num_references)

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.cat([m.inputs[key].reshape(-1) for m in self.micro_batches if not m.piece.is_filler] or [_EMPTY])

    def __contains__(self, key: object) -> bool:
        return key in self.micro_batches[0].inputs


_EMPTY = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class _StepIndex:
    """What the sampler asks the data set for: the samples of this rank's pieces."""

    pieces: tuple[Piece, ...]
    indices: tuple[tuple[int, ...], ...]
    num_references: int


class StepSampler(BatchSampler):
    """Yields one step of this rank at a time, as a list with one element.

    Args:
        reference: Loader of the one-process run; its batch sampler gives the micro-batches.
        shape: How they are dealt.
        broadcast: Sends rank 0's order to all.
    """

    def __init__(self, reference: DataLoader[Any], shape: StepShape, broadcast: BroadcastOrder) -> None:
        self._reference = reference
        self._shape = shape
        self._broadcast = broadcast

    def __iter__(self) -> Iterator[list[_StepIndex]]:  # type: ignore[override]
        # A sampler may draw from a random state that differs per rank; whatever it does, rank 0's draw counts.
        assert self._reference.batch_sampler is not None
        batches = self._broadcast(self._reference.batch_sampler)
        for start in range(0, len(batches), self._shape.num_accumulated):
            step = batches[start : start + self._shape.num_accumulated]
            samples = [i for batch in step for i in batch]
            pieces = self._shape.pieces([len(b) for b in step], samples)
            indices = tuple(tuple(samples[p] for p in piece.positions) for piece in pieces)
            yield [_StepIndex(tuple(pieces), indices, len(step))]

    def __len__(self) -> int:
        assert self._reference.batch_sampler is not None
        return -(-len(self._reference.batch_sampler) // self._shape.num_accumulated)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Lets the one-process sampler draw the order of `epoch`."""
        self._reference.set_epoch(epoch)  # type: ignore[attr-defined]


class StepLoader(DataLoader[Any]):
    """Loads whole steps; made by `step_loader`."""

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        steps: Any = self.dataset if isinstance(self.dataset, StepStream) else self.batch_sampler
        steps.set_epoch(epoch)


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

    def __iter__(self) -> Iterator[Step]:
        batches = iter(self._reference)
        while step := list(islice(batches, self._shape.num_accumulated)):
            rows = [row for batch in step for row in batch]
            pieces = self._shape.pieces([len(b) for b in step])
            mine = [[rows[p] for p in piece.positions] for piece in pieces]
            yield _collate_step(pieces, mine, len(step), self._collate, self._shape.regroup)

    def set_epoch(self, epoch: int) -> None:
        """Lets the stream shuffle for `epoch`."""
        self._reference.set_epoch(epoch)  # type: ignore[attr-defined]


def step_loader(
    loader: DataLoader[Any], shape: StepShape, reference: Reference, broadcast: BroadcastOrder
) -> StepLoader:
    """Turns the loader that a Trainer built for one process into this rank's loader of whole steps.

    Args:
        loader: As the Trainer built it, not yet prepared by accelerate.
        shape: How samples are dealt.
        reference: Prepares a loader as accelerate does for one process.
        broadcast: Sends rank 0's order to all ranks.
    """
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "timeout": loader.timeout,
    }
    assert loader.collate_fn is not None
    if isinstance(loader.dataset, IterableDataset):
        rows_only = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=list,
            **{**settings, "pin_memory": False},
        )
        stream = StepStream(reference(rows_only), shape, loader.collate_fn)
        return StepLoader(stream, batch_size=None, collate_fn=_as_it_is, pin_memory=loader.pin_memory)
    sampler = StepSampler(reference(loader), shape, broadcast)
    return StepLoader(
        _StepDataset(loader.dataset),
        batch_sampler=sampler,
        collate_fn=_StepCollator(loader.collate_fn, shape.regroup),
        **settings,
    )


class Reference(Protocol):
    """Prepares a loader as accelerate does for one process."""

    def __call__(self, loader: DataLoader[Any]) -> DataLoader[Any]: ...


class _StepDataset(Dataset[Any]):
    """Looks up the rows of a whole step."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: _StepIndex) -> tuple[_StepIndex, list[Rows]]:
        # Hugging Face data sets read many rows at once much faster than one by one.
        if hasattr(self._dataset, "__getitems__"):
            return index, [self._dataset.__getitems__(list(i)) for i in index.indices]
        return index, [[self._dataset[i] for i in part] for part in index.indices]

    def __len__(self) -> int:
        return len(self._dataset)


class _StepCollator:
    """Collates each piece of a step by itself. A class, because worker processes may receive it pickled."""

    def __init__(self, collate: Collate, regroup: bool) -> None:
        self._collate = collate
        self._regroup = regroup

    def __call__(self, items: list[tuple[_StepIndex, list[Rows]]]) -> Step:
        ((index, rows),) = items
        return _collate_step(index.pieces, rows, index.num_references, self._collate, self._regroup)


def _collate_step(
    pieces: Sequence[Piece], rows: Sequence[Rows], num_references: int, collate: Collate, regroup: bool
) -> Step:
    micro_batches = [MicroBatch(collate(r), piece) for piece, r in zip(pieces, rows, strict=True)]
    for micro_batch in micro_batches:
        # A mean over no labels is not a number; there the filler's share of zero is enough.
        if micro_batch.piece.is_filler and regroup:
            _mute(micro_batch.inputs)
    return Step(micro_batches, num_references)


def _as_it_is(step: Any) -> Any:
    return step


def _mute(inputs: Any) -> None:
    """Takes all labels out: a filler counts no token, and its token-normalised loss and gradient are zero."""
    for key in ("labels", "shift_labels"):
        if isinstance(inputs, Mapping) and isinstance(inputs.get(key), torch.Tensor):
            inputs[key].fill_(-100)
