"""A data loader for plain PyTorch loops: each sample of an epoch once over all ranks, in steps of one process.

Imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.identity import RankIdentity

logger = get_logger(__name__)


@dataclass(frozen=True)
class EpochPlan:
    """Where the steps of an epoch begin and end, and which part of each is whose. Pure.

    Step `i` takes `step_samples` samples from place `i * step_samples` on. If those left at the end are fewer than the
    ranks, they join the last step, so that each rank has one in every step.

    Args:
        num_samples: Samples of the data set.
        step_samples: Samples of one step over all ranks.
        world_size: Number of ranks.
        drop_last: Samples that do not fill a step are left out.
    """

    num_samples: int
    step_samples: int
    world_size: int
    drop_last: bool = False

    @property
    def num_steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        num_full, rest = divmod(self.num_samples, self.step_samples)
        return num_full + (rest >= self.world_size and not self.drop_last)

    def share(self, step: int, rank: int) -> range:
        """Places in the epoch's order that are the rank's in that step: contiguous, as even as whole samples allow."""
        start, stop = self._bounds(step)
        cuts = [start + r * (stop - start) // self.world_size for r in (rank, rank + 1)]
        return range(*cuts)

    def loss_weight(self, step: int, rank: int) -> float:
        """What the mean loss of that share counts so that the average over ranks is the mean over the step."""
        start, stop = self._bounds(step)
        return len(self.share(step, rank)) * self.world_size / (stop - start)

    def _bounds(self, step: int) -> tuple[int, int]:
        start = step * self.step_samples
        if step < self.num_steps - 1 or self.drop_last:
            return start, start + self.step_samples
        return start, self.num_samples


class DistributedLoader(DataLoader[Any]):
    """Loads this rank's batches; see `unsloth_multigpu.distributed_loader`.

    Attributes:
        plan: The steps of an epoch.
        loss_weight: What the mean loss of the batch counts that was yielded last. 1.0 where the ranks' parts are equal.
    """

    def __init__(
        self,
        dataset: Any,
        plan: EpochPlan,
        rank: int,
        *,
        shuffle: bool,
        seed: int,
        **options: Any,
    ) -> None:
        self.plan = plan
        self.loss_weight = 1.0
        self._rank = rank
        sampler = _ShareSampler(plan, rank, shuffle=shuffle, seed=seed)
        super().__init__(dataset, batch_sampler=sampler, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Workers are ahead of the batch that is yielded, so its weight is told here and not where it is drawn.
        for step, batch in enumerate(super().__iter__()):
            self.loss_weight = self.plan.loss_weight(step, self._rank)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Lets the next iteration begin epoch `epoch`, and those after it the following ones."""
        sampler: Any = self.batch_sampler
        sampler.epoch = epoch


def distributed_loader(
    dataset: Any,
    batch_size: int,
    identity: RankIdentity,
    *,
    keeps_step: bool,
    drop_last: bool = False,
    **options: Any,
) -> DistributedLoader:
    """See `unsloth_multigpu.distributed_loader`."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} has no length: its samples cannot be dealt to ranks by their numbers.",
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
    plan = EpochPlan(len(dataset), step_samples, world_size, drop_last)
    if identity.rank == 0:
        _tell_uneven(plan)
    return DistributedLoader(dataset, plan, identity.rank, **options)


class _ShareSampler(Sampler[list[int]]):
    """Yields this rank's indices of each step; every iteration is the next epoch, in an order of its own."""

    def __init__(self, plan: EpochPlan, rank: int, *, shuffle: bool, seed: int) -> None:
        self._plan = plan
        self._rank = rank
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = range(self._plan.num_samples) if not self._shuffle else self._shuffled()
        self.epoch += 1
        for step in range(len(self)):
            yield [order[i] for i in self._plan.share(step, self._rank)]

    def __len__(self) -> int:
        return self._plan.num_steps

    def _shuffled(self) -> Any:
        # Of its own: the ranks' random states may differ.
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return torch.randperm(self._plan.num_samples, generator=generator).tolist()


def _tell_uneven(plan: EpochPlan) -> None:
    for step in sorted({plan.num_steps - 1, 0}) if plan.num_steps else ():
        sizes = [len(plan.share(step, rank)) for rank in range(plan.world_size)]
        if len(set(sizes)) > 1:
            logger.warning(
                "%s %d = %s samples: multiply the loss with loader.loss_weight for the gradient of one process",
                "the last step of an epoch is" if step else "a step is",
                sum(sizes),
                " + ".join(map(str, sizes)),
            )
            return
