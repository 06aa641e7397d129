"""Divides an evaluation among the ranks: they take the batches of one process in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from unsloth_multigpu.deal.one_process import as_one_process, batches_of_one_process
from unsloth_multigpu.deal.sampler import rows_only, with_batches
from unsloth_multigpu.errors import DivergenceError
from unsloth_multigpu.group.facts import plain_values
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.wire.digest import digest_of


@dataclass(frozen=True, eq=False)
class Share:
    """A rank's share of an evaluation: `loader` yields its batches, on its device.

    `rows_kept` returns how many rows of the gathered last batch accelerate keeps in one process; None = all.
    """

    loader: Any
    turns: Turns
    rows_kept: Callable[[Any], int | None]


@dataclass(eq=False)
class Turns:
    """Yields this rank's part of the batches of one process: batch `i` is for rank `i % num_ranks`.

    The ranks synchronize in each round. A rank without a batch in the last round gets the first batch as a filler.

    Args:
        batches: Batches of one process, as indices or rows.
        read: Starts a pass over the batches.
        meet: Called with each round of batches, and with an empty one at the end.
    """

    batches: Any
    read: Callable[[], Iterable[Any]]
    rank: int
    num_ranks: int
    meet: Callable[[list[Any]], None] = lambda _: None
    # Number of batches of one process, known in the last round.
    num_batches: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.num_batches = None
        batches, first, num_read = iter(self.read()), None, 0
        following = self._round(batches)
        while following:
            current, following = following, self._round(batches)
            first = current[0] if first is None else first
            num_read += len(current)
            if not following:
                self.num_batches = num_read
            yield current[self.rank] if self.rank < len(current) else first
        self.num_batches = num_read

    def __len__(self) -> int:
        return -(-len(self.batches) // self.num_ranks)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate where a pass begins."""
        for sampler in (self.batches, getattr(self.batches, "sampler", None)):
            if (tell := getattr(sampler, "set_epoch", None)) is not None:
                tell(epoch)

    def _round(self, batches: Iterator[Any]) -> list[Any]:
        found = list(islice(batches, self.num_ranks))
        self.meet(found)
        return found


def share_of(trainer: TrainerLike, manager: DDPManager, loader: Any, *, is_whole: bool) -> Share | None:
    """Returns a rank's share of an evaluation; None if it is left to accelerate.

    That is so for trainers that generate samples, metrics of single batches (`batch_eval_metrics`,
    `eval_do_concat_batches=False`), loaders whose division cannot be undone, loaders without batches, and other
    iterables. `is_whole`: the loader was prepared as for one process.
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
    # accelerate dispatches in one process as well.
    is_dispatched = is_dispatcher or (is_whole and (is_stream if asked is None else asked))
    if is_stream:
        if not (is_whole or is_dispatcher or type(loader) is DataLoader):
            return None
        return _share_of_stream(trainer, manager, loader, _rows_kept(loader, loader.batch_size, is_dispatched))
    world_size, batches = manager.identity.world_size, loader.batch_sampler
    if isinstance(batches, BatchSamplerShard) and batches.num_processes == world_size:
        batches = batches.batch_sampler
    samplers = (batches, getattr(batches, "sampler", None))
    is_divided = any((getattr(sampler, "num_replicas", None) or 1) > 1 for sampler in samplers)
    if batches is None or is_divided or isinstance(batches, BatchSamplerShard):
        return None
    is_in_order = type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler

    def read() -> Iterable[Any]:
        # All ranks draw an order, so that their generators stay equal, and use rank 0's.
        return batches if is_in_order else manager.broadcast_batches(list(batches))

    turns = Turns(batches, read, manager.identity.rank, world_size)
    prepared = as_one_process(trainer, with_batches(loader, turns), is_placed=True, is_seedable=False)
    return Share(prepared, turns, _rows_kept(loader, getattr(batches, "batch_size", None), is_dispatched))


def _rows_kept(loader: Any, batch_size: int | None, is_dispatched: bool) -> Callable[[Any], int | None]:
    from accelerate.utils.operations import ignorant_find_batch_size

    if is_dispatched:
        return ignorant_find_batch_size  # type: ignore[no-any-return]
    try:
        # A loader that accelerate has not prepared lacks the attribute, and nothing is truncated.
        rest = 0 if getattr(loader, "_drop_last", True) else len(loader.dataset) % int(batch_size or 0)
    except (TypeError, NotImplementedError, ZeroDivisionError):  # As accelerate does where a length is not known.
        rest = 0
    return lambda _: rest or None


def _share_of_stream(
    trainer: TrainerLike, manager: DDPManager, loader: DataLoader[Any], rows_kept: Callable[[Any], int | None]
) -> Share:
    assert loader.collate_fn is not None
    reference = as_one_process(trainer, rows_only(loader, loader.generator))

    def meet(found: list[Any]) -> None:
        first = (found[0] if loader.batch_size is None else found[0][0]) if found else None
        mine = [len(found), digest_of(plain_values(first))]
        ranks = manager.gather_json(mine)
        if any(theirs != ranks[0] for theirs in ranks):
            other = next(rank for rank, theirs in enumerate(ranks) if theirs != ranks[0])
            raise DivergenceError(
                f"An evaluation reads a stream, and the rows of rank {other} differ from those of rank 0.",
                hint="Each rank reads the whole stream and computes its share of the batches. Leave out what divides "
                "it by RANK, WORLD_SIZE or split_dataset_by_node, and give shuffles and generators of your own a seed.",
            )

    turns = Turns(reference, lambda: reference, manager.identity.rank, manager.identity.world_size, meet)
    return Share(_StreamLoader(turns, loader.dataset, loader.collate_fn, trainer.args.device), turns, rows_kept)


class _StreamLoader:
    """Yields this rank's batches of a stream. Each rank reads the complete stream and collates only its batches."""

    def __init__(self, turns: Turns, dataset: Any, collate: Callable[[Any], Any], device: Any) -> None:
        self.dataset = dataset
        self._turns, self._collate, self._device = turns, collate, device

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        for rows in self._turns:
            yield send_to_device(self._collate(rows), self._device)

    def __len__(self) -> int:
        """Returns the number of batches. TypeError if the stream has no length."""
        return len(self._turns)


class EvaluationLoaders:
    """Loaders of evaluations. Scripts read the batches of one process from them, evaluation loops a rank's share."""

    def __init__(self) -> None:
        # Loader of one process -> function that returns accelerate's divided loader, made once.
        self._divided: WeakKeyDictionary[DataLoader[Any], Callable[[], Any]] = WeakKeyDictionary()
        # A share belongs to one trainer and one manager.
        self._shares: WeakKeyDictionary[Any, tuple[TrainerLike, DDPManager, Share | None]] = WeakKeyDictionary()

    def building(self, trainer: TrainerLike) -> AbstractContextManager[None]:
        """Gives loaders that the Trainer builds within the context the batches of one process."""

        def note(whole: Any, divide: Callable[[], Any]) -> None:
            # Made once, because worker processes may live as long as the loader.
            self._divided[whole] = functools.cache(divide)

        return batches_of_one_process(trainer, note)

    def is_whole(self, loader: Any) -> bool:
        """True for a loader built in `building`, from which each rank reads all rows."""
        return isinstance(loader, DataLoader) and loader in self._divided

    def divided(self, loader: Any) -> Any:
        """Returns accelerate's divided loader for one built in `building`; other loaders unchanged."""
        divide = self._divided.get(loader) if isinstance(loader, DataLoader) else None
        return loader if divide is None else divide()

    def share(self, trainer: TrainerLike, manager: DDPManager, loader: Any) -> Share | None:
        """Returns this rank's share of an evaluation over a loader, see `share_of`. It is made once."""
        if not isinstance(loader, DataLoader):
            return None
        found = self._shares.get(loader)
        if found is None or found[0] is not trainer or found[1] is not manager:
            share = share_of(trainer, manager, loader, is_whole=self.is_whole(loader))
            found = self._shares[loader] = (trainer, manager, share)
        return found[2]
