"""A data loader for plain PyTorch loops, in which the ranks share the steps of one process.

Imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.step.accelerated import SharedBatches, rows_of_ranks
from unsloth_multigpu.wire.identity import RankIdentity

logger = get_logger(__name__)


class DistributedLoader(DataLoader[Any]):
    """Loads this rank's batches; see `unsloth_multigpu.distributed_loader`.

    Attributes:
        loss_weight: Weight of the mean loss of the batch yielded last, so that the average over ranks is the mean over
            the step. 1.0 if all ranks have as many samples, 0.0 for a rank that has none.
    """

    def __init__(self, dataset: Any, steps: BatchSampler, rank: int, world_size: int, **options: Any) -> None:
        self.loss_weight = 1.0
        self._steps, self._rank, self._world_size = steps, rank, world_size
        super().__init__(dataset, batch_sampler=SharedBatches(steps, rank, world_size, None), **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Workers load ahead, so the weight is set when the batch is yielded.
        for step, batch in enumerate(super().__iter__()):
            rows = self.rows(step)
            self.loss_weight = rows[self._rank] * self._world_size / sum(rows)
            yield batch

    def rows(self, step: int) -> list[int]:
        """Returns the number of samples of each rank in a step."""
        size = self._steps.batch_size
        return rows_of_ranks(min(size, len(self.dataset) - step * size), self._world_size)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. Later iterations count on from it."""
        order: Any = self._steps.sampler
        order.epoch = epoch


def distributed_loader(
    dataset: Any,
    batch_size: int,
    identity: RankIdentity,
    *,
    keeps_step: bool,
    shuffle: bool,
    seed: int,
    drop_last: bool = False,
    **options: Any,
) -> DistributedLoader:
    """See `unsloth_multigpu.distributed_loader`."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} has no length, so ranks cannot share its samples by index.",
            hint="Give a data set with __len__ and __getitem__.",
        )
    world_size = identity.world_size
    step_samples = batch_size if keeps_step else batch_size * world_size
    if step_samples < world_size or (len(dataset) < world_size and not drop_last):
        raise ConfigError(
            f"A step of {step_samples} and a data set of {len(dataset)} sample(s) cannot be shared by {world_size} "
            "rank(s).",
            hint=f'Raise batch_size to {world_size} or more, or use global_batch="scale", or fewer GPUs.',
        )
    steps = BatchSampler(_Order(len(dataset), shuffle, seed), step_samples, drop_last)
    loader = DistributedLoader(dataset, steps, identity.rank, world_size, **options)
    if identity.rank == 0:
        _tell_uneven(loader)
    return loader


class _Order(Sampler[int]):
    """Indices of the samples of an epoch. Every iteration is a new epoch with another order."""

    def __init__(self, num_samples: int, shuffle: bool, seed: int) -> None:
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        # A generator of its own, since the random states of ranks may differ.
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        self.epoch += 1
        every = torch.randperm(self._num_samples, generator=generator).tolist() if self._shuffle else ()
        yield from every or range(self._num_samples)

    def __len__(self) -> int:
        return self._num_samples


def _tell_uneven(loader: DistributedLoader) -> None:
    for step in sorted({len(loader) - 1, 0}) if len(loader) else ():
        rows = loader.rows(step)
        if len(set(rows)) > 1:
            logger.warning(
                "%s %d = %s samples: multiply the loss with loader.loss_weight for the gradient of one process",
                "the last step of an epoch is" if step else "a step is",
                sum(rows),
                " + ".join(map(str, rows)),
            )
            return
