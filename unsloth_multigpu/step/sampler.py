"""A data loader whose every item is one optimizer step of this rank.

The order of samples is the one-process run's own: the Trainer's sampler draws it on rank 0, the others receive it.
Because one item is one step, ranks may do different numbers of micro-batches, and resuming in the middle of an epoch
skips steps, whatever the number of ranks was. What the data set and the collator draw for a step depends on the step's
place in the training alone, so that a step is the same whether those before it were computed or skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.random_state import draw_seed, drawn_from, seeded_draws
from unsloth_multigpu.step.deal import Piece
from unsloth_multigpu.step.own_code import is_library
from unsloth_multigpu.step.step import Collate, Rows, Step, StepShape, collate_step
from unsloth_multigpu.step.stream import StepStream

# Gives every rank what rank 0 passes in.
BroadcastOrder = Callable[[Iterable[Sequence[int]]], list[list[int]]]
# Is told rank 0's order, the state of generators at which it was drawn (None = it draws nothing), and its source.
CompareOrder = Callable[[list[list[int]], dict[str, Any] | None, Iterable[Sequence[int]]], None]
# Prepares a loader as accelerate does for one process.
Reference = Callable[[DataLoader[Any]], DataLoader[Any]]


@dataclass(eq=False)
class _StepIndex:
    """What the sampler asks the data set for: the samples of this rank's pieces.

    Args:
        samples: Of the whole step.
        sizes: Rows of each micro-batch that the one-process run would do in it.
        seed: For what the data set and the collator draw.
        make_pieces: Makes this rank's pieces, where the step is loaded: a step that is skipped needs no plan.
    """

    samples: tuple[int, ...]
    sizes: tuple[int, ...]
    seed: int
    make_pieces: Callable[[], list[Piece]]


@dataclass(eq=False, repr=False)
class StepSampler(BatchSampler):
    """Yields one step of this rank at a time, as a list with one element.

    Args:
        reference: Loader of the one-process run; its batch sampler gives the micro-batches.
        shape: How they are dealt.
        broadcast: Sends rank 0's order to all.
        compare: Compares it with that of this rank; None = it is a library's.

    Attributes:
        order_state: Of rank 0's generators when the order of this epoch was drawn; None where it does not depend on
            them, and on other ranks.
        resumed_order_state: The same of a resumed epoch; the next order is drawn from it.
    """

    reference: DataLoader[Any]
    shape: StepShape
    broadcast: BroadcastOrder
    compare: CompareOrder | None = None
    order_state: dict[str, Any] | None = field(init=False, default=None)
    resumed_order_state: dict[str, Any] | None = field(init=False, default=None)
    _epoch: int = field(init=False, default=0)

    def __iter__(self) -> Iterator[list[_StepIndex]]:  # type: ignore[override]
        # A sampler may draw from a random state that differs per rank; whatever it does, rank 0's draw counts.
        batches = self.broadcast(self._draw_order())
        if self.compare is not None:
            assert self.reference.batch_sampler is not None
            self.compare(batches, self.order_state, self.reference.batch_sampler)
        for place, start in enumerate(range(0, len(batches), self.shape.num_accumulated)):
            step = batches[start : start + self.shape.num_accumulated]
            samples = tuple(i for batch in step for i in batch)
            sizes = tuple(map(len, step))
            seed = draw_seed(self.shape.rank_seed, self._epoch, place)
            make = None if self.shape.planner is None else self.shape.planner(samples, sizes)
            # A worker of the loader gets no planner: it holds the trainer.
            dealt_by = replace(self.shape, planner=None)
            yield [_StepIndex(samples, sizes, seed, functools.partial(dealt_by.pieces, sizes, make))]

    def _draw_order(self) -> Iterator[Sequence[int]]:
        assert self.reference.batch_sampler is not None
        batches, self.order_state = drawn_from(self.resumed_order_state, self.reference.batch_sampler)
        self.resumed_order_state = None
        yield from batches

    def __len__(self) -> int:
        assert self.reference.batch_sampler is not None
        return -(-len(self.reference.batch_sampler) // self.shape.num_accumulated)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Lets the one-process sampler draw the order of `epoch`."""
        self._epoch = epoch
        self.reference.set_epoch(epoch)  # type: ignore[attr-defined]


class StepLoader(DataLoader[Any]):
    """Loads whole steps; made by `step_loader`.

    Attributes:
        one_process: The loader that one process has in its place, with the script's own data set and batches.
    """

    one_process: DataLoader[Any]

    def __len__(self) -> int:
        """Steps of an epoch. TypeError for a stream whose data set does not say its length."""
        return self.dataset.num_steps() if isinstance(self.dataset, StepStream) else super().__len__()

    @property
    def _steps(self) -> Any:
        return self.dataset if isinstance(self.dataset, StepStream) else self.batch_sampler

    @property
    def shape(self) -> StepShape:
        """How samples are dealt."""
        return self._steps.shape  # type: ignore[no-any-return]

    def deal(self, shape: StepShape) -> None:
        """Deals samples by another shape, from the next epoch on."""
        self._steps.shape = shape

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        self._steps.set_epoch(epoch)


def step_loader(
    loader: DataLoader[Any],
    shape: StepShape,
    reference: Reference,
    broadcast: BroadcastOrder,
    compare: CompareOrder | None = None,
) -> StepLoader:
    """Turns the loader that a Trainer built for one process into this rank's loader of whole steps.

    Args:
        loader: As the Trainer built it, not yet prepared by accelerate.
        shape: How samples are dealt.
        reference: Prepares a loader as accelerate does for one process.
        broadcast: Sends rank 0's order to all ranks.
        compare: Compares it with a rank's own, where the script's own sampler draws it.

    Raises:
        SetupError: The data set gives whole batches. There are fewer rows than a batch, and incomplete ones are
            dropped. Or the script's sampler has divided the rows among the ranks.
    """
    assert loader.collate_fn is not None
    if loader.batch_sampler is None:
        raise SetupError(
            "A data set of ready batches (batch_size=None) cannot be dealt: a step is cut from its rows.",
            hint="Let the data set give rows and the loader batches of them. Or let each batch be a row: "
            "DataLoader(..., batch_size=1, collate_fn=lambda rows: rows[0]) with per_device_train_batch_size=1. Or set "
            "global_batch='scale'.",
        )
    if isinstance(loader.dataset, IterableDataset):
        rows_only = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=list,
            **worker_settings(loader),
        )
        stream = StepStream(reference(rows_only), shape, loader.collate_fn)
        steps = StepLoader(stream, batch_size=None, collate_fn=_as_it_is, pin_memory=loader.pin_memory)
        steps.one_process = loader
        return steps
    if loader.drop_last and len(loader) == 0:
        num_rows = len(loader.dataset)  # type: ignore[arg-type]
        raise SetupError(
            f"{num_rows} row(s) make no whole batch of {loader.batch_size} with dataloader_drop_last=True.",
            hint="Leave dataloader_drop_last out, or set a smaller per_device_train_batch_size.",
        )
    if shape.world_size * shape.num_sharing > 1:
        _refuse_divided(loader)
    one_process = reference(loader)
    sampler = StepSampler(one_process, shape, broadcast, compare if own_samplers(loader) else None)
    steps = StepLoader(
        _StepDataset(loader.dataset, loader.collate_fn),
        batch_sampler=sampler,
        collate_fn=_only,
        # It seeds the workers before the sampler is asked for the order, which it may draw from the same generator.
        generator=loader.generator,
        pin_memory=loader.pin_memory,
        **worker_settings(loader),
    )
    steps.one_process = one_process
    return steps


def worker_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a loader that say how its rows are read."""
    names = ("num_workers", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    return {name: getattr(loader, name) for name in (*names, "timeout")}


class _StepDataset(Dataset[Any]):
    """Looks up and collates a whole step. A class, because worker processes may receive it pickled."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self.collate = collate

    def __getitem__(self, index: _StepIndex) -> Step:
        pieces = index.make_pieces()
        with seeded_draws(index.seed):
            rows = [self.rows_of([index.samples[p] for p in piece.positions]) for piece in pieces]
            step = collate_step(pieces, rows, len(index.sizes), self.collate)
        step.sizes, step.samples = index.sizes, index.samples
        return step

    def rows_of(self, indices: Sequence[int]) -> Rows:
        """Looks rows up."""
        indices = list(indices)
        # Hugging Face data sets read many rows at once much faster than one by one.
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(indices))
        return [self._dataset[i] for i in indices]

    def __len__(self) -> int:
        return len(self._dataset)


def _samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """What draws the order of its rows: the sampler of batches, and that of rows, which it may ask."""
    rows = getattr(loader.batch_sampler, "sampler", None)
    return [loader.batch_sampler] if rows is None else [loader.batch_sampler, rows]


def own_samplers(loader: DataLoader[Any]) -> list[str]:
    """Names of the classes of those that the script wrote."""
    classes = map(type, _samplers_of(loader))
    return [each.__name__ for each in classes if not is_library(each.__module__)]


def _refuse_divided(loader: DataLoader[Any]) -> None:
    """A sampler for one of several ranks has a part of the rows: all that there is of them in rank 0's order."""
    for sampler in _samplers_of(loader):
        if (num_parts := getattr(sampler, "num_replicas", None) or 1) > 1:
            raise SetupError(
                f"The data loader has a {type(sampler).__name__} with num_replicas={num_parts}: it gives each rank a "
                "part of the rows, and unsloth_multigpu would divide it again. Most rows would never be trained.",
                hint="Leave the sampler out (shuffle=True), or set num_replicas=1 and rank=0: the samples of each step "
                "are divided among the ranks without it.",
            )


def _as_it_is(step: Any) -> Any:
    return step


def _only(steps: list[Step]) -> Step:
    (step,) = steps
    return step
