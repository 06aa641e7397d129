"""The model and the data loader of a plain PyTorch loop: DDP, and batches that the ranks share.

Imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.group.manager import DDPManager, local_device
from unsloth_multigpu.group.model import inner_name
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.option_type import Scope
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.step.accelerated import SharedBatches, rows_of_ranks
from unsloth_multigpu.wire.identity import RankIdentity

logger = get_logger(__name__)


def wrap_model(model: nn.Module, manager: DDPManager, *, find_unused_parameters: bool = False) -> nn.Module:
    """See `unsloth_multigpu.wrap_model_multi_gpu`. Collective in ranks."""
    if any(isinstance(m, DistributedDataParallel) for m in _chain(model)):
        return model
    _refuse_options_of_trainers(manager.config)
    is_rank = manager.identity.world_size > 1
    device = local_device(manager.identity, manager.config)
    if is_rank and device.type != "cpu":
        # NCCL and "cuda" without an index use the current device.
        torch.accelerator.set_device_index(device.index)
    places = {t.device for t in chain(model.parameters(), model.buffers())}
    # In one process it stays on another accelerator if the script has moved it there.
    if not places <= {device} and (is_rank or all(p.type in ("cpu", "meta") for p in places)):
        model.to(device)
    logger.info("model is_ddp=%s world_size=%d device=%s", is_rank, manager.identity.world_size, device)
    if not is_rank:
        return model
    if not any(p.requires_grad for p in model.parameters()):
        raise SetupError(
            "No parameter of the model requires a gradient: there is nothing to train.",
            hint="Set requires_grad before wrapping; a model that is not trained needs no wrapper.",
        )
    manager.open_group()
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        find_unused_parameters=find_unused_parameters,
        # Saves a copy of the gradients.
        gradient_as_bucket_view=True,
    )


def unwrap_model(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and `torch.compile`, in any order and number."""
    *_, innermost = _chain(model)
    return innermost


def _chain(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model, the model that it wraps, and so on."""
    yield model
    while (name := inner_name(model)) is not None:
        model = getattr(model, name)
        yield model


def _refuse_options_of_trainers(config: MultiGPUConfig) -> None:
    """Refuses options of enable_multi_gpu that have no effect in a plain loop."""
    if asked := config.asked(Scope.TRAINER):
        raise SetupError(
            f"{asked[0]} needs a transformers.Trainer, and has no effect in a plain loop.",
            hint=f"Leave {asked[0].partition('=')[0]} out.",
        )


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
