"""A data loader in which each item is one optimizer step of this rank.

The order of samples is that of one process: the Trainer's sampler draws it on rank 0, and the other ranks receive it.
Since an item is a step, ranks may have different numbers of micro-batches, and a training can resume in the middle of
an epoch with another number of ranks. Random numbers of the data set and the collator depend only on the step's
position in the training, so a step is the same whether earlier steps were computed or skipped.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from unsloth_multigpu.deal.deal import Collate, MakePlan, Piece, Rows, Step, StepShape, collate_step
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.random_state import draw_seed, drawn_from, seeded_draws
from unsloth_multigpu.library import is_library

# Broadcasts rank 0's argument to every rank.
BroadcastOrder = Callable[[Iterable[Sequence[int]]], list[list[int]]]
# Takes rank 0's order, the state of the generators before it was drawn (None = nothing is drawn), and its source.
CompareOrder = Callable[[list[list[int]], dict[str, Any] | None, Iterable[Sequence[int]]], None]
Planner = Callable[[Sequence[int], Sequence[int]], MakePlan | None]
# Prepares a loader as accelerate does for one process.
Reference = Callable[[DataLoader[Any]], DataLoader[Any]]


@dataclass(eq=False)
class _StepIndex:
    """The index that the sampler passes to the data set: the samples of a step, and the sizes of its micro-batches in
    one process. This rank's pieces are made when the step is loaded: a skipped step needs no plan.
    """

    samples: tuple[int, ...]
    sizes: tuple[int, ...]
    seed: int
    make_pieces: Callable[[], list[Piece]]


@dataclass(eq=False, repr=False)
class StepSampler(BatchSampler):
    """Yields one step of this rank at a time, as a list with one element.

    Args:
        reference: The loader of one process; its batch sampler yields the micro-batches.
        broadcast: Sends rank 0's order to all ranks.
        compare: Compares it with the order of this rank; None for samplers of libraries.
        planner: Called with the samples of a step and the rows of its micro-batches in one process, at the same point
            of the training on all ranks. If it is None, or returns None, samples are dealt in order.

    Attributes:
        order_state: State of rank 0's generators before the order of this epoch was drawn. None if the order does not
            depend on it; None on ranks above 0.
        resumed_order_state: The state of a resumed epoch, from which the next order is drawn.
    """

    reference: Any
    shape: StepShape
    broadcast: BroadcastOrder
    compare: CompareOrder | None = None
    planner: Planner | None = None
    order_state: dict[str, Any] | None = field(init=False, default=None)
    resumed_order_state: dict[str, Any] | None = field(init=False, default=None)
    _epoch: int = field(init=False, default=0)

    def __iter__(self) -> Iterator[list[_StepIndex]]:  # type: ignore[override]
        # A sampler may use a random state that differs between ranks. All ranks follow rank 0's order.
        batches = self.broadcast(self._draw_order())
        if self.compare is not None:
            self.compare(batches, self.order_state, self.reference.batch_sampler)
        for place, start in enumerate(range(0, len(batches), self.shape.num_accumulated)):
            step = batches[start : start + self.shape.num_accumulated]
            samples = tuple(i for batch in step for i in batch)
            sizes = tuple(map(len, step))
            seed = draw_seed(self.shape.rank_seed, self._epoch, place)
            make = None if self.planner is None else self.planner(samples, sizes)
            yield [_StepIndex(samples, sizes, seed, functools.partial(self.shape.pieces, sizes, make))]

    def _draw_order(self) -> Iterator[Sequence[int]]:
        batches, self.order_state = drawn_from(self.resumed_order_state, self.reference.batch_sampler)
        self.resumed_order_state = None
        yield from batches

    def __len__(self) -> int:
        return -(-len(self.reference.batch_sampler) // self.shape.num_accumulated)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the sampler of one process."""
        self._epoch = epoch
        self.reference.set_epoch(epoch)


class StepLoader(DataLoader[Any]):
    """Loads optimizer steps. `one_process` is the loader of one process, with the script's own data set and batches."""

    one_process: DataLoader[Any]

    def __len__(self) -> int:
        """Returns the steps of an epoch. TypeError for a stream without a length."""
        return self.steps.num_steps() if self.is_stream else super().__len__()

    @property
    def is_stream(self) -> bool:
        """The data set is a `StepStream`."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def steps(self) -> Any:
        """The `StepStream` or `StepSampler`, whose `shape` says how samples are dealt from the next epoch on."""
        return self.dataset if self.is_stream else self.batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        self.steps.set_epoch(epoch)


def step_loader(
    loader: DataLoader[Any],
    shape: StepShape,
    reference: Reference,
    broadcast: BroadcastOrder,
    compare: CompareOrder | None = None,
    planner: Planner | None = None,
) -> StepLoader:
    """Converts a Trainer's data loader, not yet prepared by accelerate, into this rank's loader of optimizer steps.

    `reference` prepares a loader as accelerate does for one process; for the others see `StepSampler`.

    Raises SetupError if the data set yields batches, `drop_last` leaves none, or the sampler divides rows by rank.
    """
    assert loader.collate_fn is not None
    if loader.batch_sampler is None:
        raise SetupError(
            "A data set of ready batches (batch_size=None) cannot be divided: the ranks share the rows of a step.",
            hint="Let the data set give rows and the loader batches of them. Or let each batch be a row: "
            "DataLoader(..., batch_size=1, collate_fn=lambda rows: rows[0]) with per_device_train_batch_size=1. Or set "
            "global_batch='scale'.",
        )
    if isinstance(loader.dataset, IterableDataset):
        from unsloth_multigpu.deal.stream import StepStream

        stream = StepStream(reference(rows_only(loader)), shape, loader.collate_fn)
        steps = StepLoader(stream, batch_size=None, collate_fn=as_it_is, pin_memory=loader.pin_memory)
        steps.one_process = loader
        return steps
    if loader.drop_last and len(loader) == 0:
        num_rows = len(loader.dataset)  # type: ignore[arg-type]
        raise SetupError(
            f"{num_rows} row(s) are no full batch of {loader.batch_size}, and dataloader_drop_last=True drops them.",
            hint="Leave dataloader_drop_last out, or set a smaller per_device_train_batch_size.",
        )
    if shape.world_size * shape.num_sharing > 1:
        _refuse_divided(loader)
    one_process = reference(loader)
    sampler = StepSampler(one_process, shape, broadcast, compare if own_samplers(loader) else None, planner)
    steps = StepLoader(
        _StepDataset(loader.dataset, loader.collate_fn),
        batch_sampler=sampler,
        collate_fn=operator.itemgetter(0),  # The only step.
        # Workers are seeded before the sampler draws the order, possibly from the same generator.
        generator=loader.generator,
        pin_memory=loader.pin_memory,
        **_worker_settings(loader),
    )
    steps.one_process = one_process
    return steps


def rows_only(loader: DataLoader[Any], generator: torch.Generator | None = None) -> DataLoader[Any]:
    """Returns a loader of the rows of a stream, batch by batch, not collated."""
    how: Any = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "generator": generator}
    collate = as_it_is if loader.batch_size is None else list
    return DataLoader(loader.dataset, collate_fn=collate, **how, **_worker_settings(loader))


def _worker_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the arguments of a loader that configure how rows are read."""
    names = ("num_workers", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    return {name: getattr(loader, name) for name in (*names, "timeout")}


def with_batches(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Returns a torch loader like `loader` with another batch sampler, `batches`."""
    settings = {name: getattr(loader, name) for name in ("collate_fn", "pin_memory", "generator")}
    return DataLoader(loader.dataset, batch_sampler=batches, **settings, **_worker_settings(loader))


class _StepDataset(Dataset[Any]):
    """Looks up and collates the rows of a step. A class, because worker processes may receive it pickled."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self.collate = collate

    def __getitem__(self, index: _StepIndex) -> Step:
        pieces = index.make_pieces()
        with seeded_draws(index.seed):
            rows = [self.rows_of([index.samples[p] for p in piece.positions]) for piece in pieces]
            step = collate_step(pieces, rows, index.sizes, self.collate)
        step.samples = index.samples
        return step

    def rows_of(self, indices: Sequence[int]) -> Rows:
        indices = list(indices)
        # Hugging Face data sets read many rows at once much faster.
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(indices))
        return [self._dataset[i] for i in indices]

    def __len__(self) -> int:
        return len(self._dataset)


def _samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Returns the objects that draw the order of rows: the batch sampler, and its row sampler if it has one."""
    rows = getattr(loader.batch_sampler, "sampler", None)
    return [loader.batch_sampler] if rows is None else [loader.batch_sampler, rows]


def own_samplers(loader: DataLoader[Any]) -> list[str]:
    """Returns class names of samplers that the script defines."""
    classes = map(type, _samplers_of(loader))
    return [each.__name__ for each in classes if not is_library(each.__module__)]


def _refuse_divided(loader: DataLoader[Any]) -> None:
    """Refuses a distributed sampler: rank 0's order would only have rank 0's part of the rows."""
    for sampler in _samplers_of(loader):
        if (num_parts := getattr(sampler, "num_replicas", None) or 1) > 1:
            raise SetupError(
                f"The data loader has a {type(sampler).__name__} with num_replicas={num_parts}: it gives each rank a "
                "part of the rows, and unsloth_multigpu would divide it again. Most rows would never be trained.",
                hint="Leave the sampler out (shuffle=True), or set num_replicas=1 and rank=0: the samples of each step "
                "are divided among the ranks without it.",
            )


def as_it_is(item: Any) -> Any:
    """A collator that changes nothing. Worker processes may receive it pickled."""
    return item
