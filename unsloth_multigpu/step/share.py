"""Which batches of an evaluation does this rank compute? Whole ones of one process, in turn with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from unsloth_multigpu.errors import DivergenceError
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.rows import plain_values
from unsloth_multigpu.step.one_process import as_one_process
from unsloth_multigpu.step.sampler import worker_settings
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.digest import digest_int64


@dataclass(frozen=True, eq=False)
class Share:
    """What a rank computes of an evaluation.

    Args:
        loader: Gives this rank's batches, on its device.
        turns: Whose turn each batch is.
        rows_kept: Of the last batch: to how many rows accelerate cuts in one process what it gives; None = it does not.
    """

    loader: Any
    turns: Turns
    rows_kept: Callable[[Any], int | None]


class Turns:
    """This rank's part of the batches of one process: batch `i` is for rank `i % num_ranks`.

    Ranks meet in each round. One that has no batch in the last round gets the first batch again, as a filler.

    Args:
        batches: Of one process: indices, or rows.
        read: Begins a pass over them.
        meet: Called with each round that was read; with an empty one at the end.
    """

    def __init__(
        self,
        batches: Any,
        read: Callable[[], Iterable[Any]],
        rank: int,
        num_ranks: int,
        meet: Callable[[list[Any]], None] = lambda _: None,
    ) -> None:
        self._batches, self._read, self._meet = batches, read, meet
        self._rank, self._num_ranks = rank, num_ranks
        # Of one process; known when the last round is given out.
        self.num_batches: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.num_batches = None
        batches, first, num_read = iter(self._read()), None, 0
        following = self._round(batches)
        while following:
            current, following = following, self._round(batches)
            first = current[0] if first is None else first
            num_read += len(current)
            if not following:
                self.num_batches = num_read
            yield current[self._rank] if self._rank < len(current) else first
        self.num_batches = num_read

    def __len__(self) -> int:
        return -(-len(self._batches) // self._num_ranks)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate where a pass begins."""
        for sampler in (self._batches, getattr(self._batches, "sampler", None)):
            if (tell := getattr(sampler, "set_epoch", None)) is not None:
                tell(epoch)

    def _round(self, batches: Iterator[Any]) -> list[Any]:
        found = list(islice(batches, self._num_ranks))
        self._meet(found)
        return found


def share_of(trainer: TrainerLike, manager: DDPManager, loader: Any, *, is_whole: bool) -> Share | None:
    """A rank's share of an evaluation; None for what stays accelerate's.

    That are trainers that generate samples, metrics of single batches (`batch_eval_metrics`,
    `eval_do_concat_batches=False`), loaders that are divided in a way that cannot be undone, loaders without
    batches, and what is no loader.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        loader: As the evaluation loop was given it.
        is_whole: It was prepared as for one process.
    """
    from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher

    args = trainer.args
    if not isinstance(loader, DataLoader) or hasattr(args, "steps_per_generation"):
        return None
    if args.batch_eval_metrics or not args.eval_do_concat_batches:
        return None
    is_stream = isinstance(loader.dataset, IterableDataset)
    is_dispatcher = type(loader) is DataLoaderDispatcher
    asked = trainer.accelerator.dataloader_config.dispatch_batches
    # As of one process, for which accelerate dispatches as well.
    is_dispatched = is_dispatcher or (is_whole and (is_stream if asked is None else asked))
    if is_stream:
        if not (is_whole or is_dispatcher or type(loader) is DataLoader):
            return None
        return _share_of_stream(trainer, manager, loader, _rows_kept(loader, loader.batch_size, is_dispatched))
    world_size, batches = manager.identity.world_size, loader.batch_sampler
    if isinstance(batches, BatchSamplerShard) and batches.num_processes == world_size:
        batches = batches.batch_sampler
    samplers = (batches, getattr(batches, "sampler", None))
    if batches is None or any((getattr(s, "num_replicas", None) or 1) > 1 for s in samplers):
        return None
    if isinstance(batches, BatchSamplerShard):
        return None
    is_in_order = type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler

    def read() -> Iterable[Any]:
        # All ranks draw, so that their generators stay alike; rank 0's draw counts.
        return batches if is_in_order else manager.broadcast_batches(list(batches))

    turns = Turns(batches, read, manager.identity.rank, world_size)
    mine: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=turns,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        **worker_settings(loader),
    )
    prepared = as_one_process(trainer, mine, is_placed=True, is_seedable=False)
    return Share(prepared, turns, _rows_kept(loader, getattr(batches, "batch_size", None), is_dispatched))


def _rows_kept(loader: Any, batch_size: int | None, is_dispatched: bool) -> Callable[[Any], int | None]:
    from accelerate.utils.operations import ignorant_find_batch_size

    if is_dispatched:
        return ignorant_find_batch_size  # type: ignore[no-any-return]
    try:
        # A loader that accelerate has not prepared has no such attribute, and nothing is cut.
        rest = 0 if getattr(loader, "_drop_last", True) else len(loader.dataset) % int(batch_size or 0)
    except (TypeError, NotImplementedError, ZeroDivisionError):  # As accelerate does where a length is not known.
        rest = 0
    return lambda _: rest or None


def _share_of_stream(
    trainer: TrainerLike, manager: DDPManager, loader: DataLoader[Any], rows_kept: Callable[[Any], int | None]
) -> Share:
    assert loader.collate_fn is not None
    is_batched = loader.batch_size is not None
    rows: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=list if is_batched else _as_it_is,
        generator=loader.generator,
        **worker_settings(loader),
    )
    reference = as_one_process(trainer, rows)

    def meet(found: list[Any]) -> None:
        first = (found[0][0] if is_batched else found[0]) if found else None
        mine = [len(found), digest_int64(repr(plain_values(first)).encode())]
        ranks = manager.gather_int64(mine)
        if any(theirs != ranks[0] for theirs in ranks):
            other = next(rank for rank, theirs in enumerate(ranks) if theirs != ranks[0])
            raise DivergenceError(
                f"An evaluation reads a stream, and rank {other} gets other rows than rank 0.",
                hint="Each rank reads the whole stream and computes its share of the batches. Leave out what divides "
                "it by RANK, WORLD_SIZE or split_dataset_by_node, and give shuffles and generators of your own a seed.",
            )

    turns = Turns(reference, lambda: reference, manager.identity.rank, manager.identity.world_size, meet)
    return Share(_StreamLoader(turns, loader.dataset, loader.collate_fn, trainer.args.device), turns, rows_kept)


class _StreamLoader:
    """This rank's batches of a stream that each rank reads whole; only these are collated.

    Attributes:
        dataset: The stream.
    """

    def __init__(self, turns: Turns, dataset: Any, collate: Callable[[Any], Any], device: Any) -> None:
        self.dataset = dataset
        self._turns, self._collate, self._device = turns, collate, device

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        for rows in self._turns:
            yield send_to_device(self._collate(rows), self._device)

    def __len__(self) -> int:
        """TypeError where the stream does not say its length."""
        return len(self._turns)


def _as_it_is(row: Any) -> Any:
    return row
