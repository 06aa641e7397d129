"""Training loops without a Trainer: a model in DDP, and a data loader that divides each batch between the ranks.

The functions work in ranks that `enable_multi_gpu` has started or joined, and in one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from unsloth_multigpu import plugin
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.group.manager import DDPManager, local_device
from unsloth_multigpu.group.model import unwrapped
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.option_type import Scope
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.step.accelerated import SharedBatches, rows_of_ranks
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, read_identity

logger = get_logger(__name__)


def wrap_model_multi_gpu(model: nn.Module, *, find_unused_parameters: bool = False) -> nn.Module:
    """Moves a model to this rank's device and wraps it in DistributedDataParallel.

    DDP copies rank 0's weights to all ranks and averages their gradients. All ranks must make the call, which opens the
    process group if necessary. In one process it returns the model itself. A wrapped model is returned unchanged.

    Create the optimizer after this call, since moving a model may replace its parameters. Layers that use the whole
    batch, such as BatchNorm, see only their rank's part of it.

    After `torch.manual_seed(0)` in the script all ranks draw the same dropout masks. For different ones call
    `torch.manual_seed(seed + rank)` after wrapping.

    Args:
        model: A module with a parameter that requires a gradient.
        find_unused_parameters: Argument of DDP: True if a step may leave a parameter without a gradient.

    Raises:
        SetupError: No parameter requires a gradient, an option of `enable_multi_gpu` needs a Trainer, or it was not
            called in one of several ranks.
    """
    manager = _manager()
    if any(isinstance(m, DistributedDataParallel) for m in unwrapped(model)):
        return model
    if asked := manager.config.asked(Scope.TRAINER):
        raise SetupError(
            f"{asked[0]} needs a transformers.Trainer, and has no effect in a plain loop.",
            hint=f"Leave {asked[0].partition('=')[0]} out.",
        )
    is_rank = manager.identity.world_size > 1
    device = local_device(manager.identity, manager.config)
    if is_rank and device.type != "cpu":
        # NCCL and "cuda" without an index use the current device.
        torch.accelerator.set_device_index(device.index)
    places = {t.device for t in chain(model.parameters(), model.buffers())}
    # In one process, the model stays on another accelerator if the script has moved it there.
    if not places <= {device} and (is_rank or all(p.type in ("cpu", "meta") for p in places)):
        model.to(device)
    logger.info("model is_ddp=%s world_size=%d device=%s", is_rank, manager.identity.world_size, device)
    if not is_rank:
        return model
    if not any(p.requires_grad for p in model.parameters()):
        raise SetupError(
            "No parameter of the model requires a gradient: there is nothing to train.",
            hint="Set requires_grad before wrapping, or do not wrap a model that is not trained.",
        )
    manager.open_group()
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        find_unused_parameters=find_unused_parameters,
        # Saves the memory of a copy of the gradients.
        gradient_as_bucket_view=True,
    )


def unwrap_model(model: nn.Module) -> nn.Module:
    """Returns the model inside the wrappers of DistributedDataParallel and `torch.compile`, in any order and number."""
    *_, innermost = unwrapped(model)
    return innermost


def distributed_loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    **loader_options: Any,
) -> DistributedLoader:
    """Returns a `torch.utils.data.DataLoader` of this rank's part of each step.

    Each step has the `batch_size` samples that this loader has in one process with the same seed, divided into
    contiguous parts in the order of the ranks. All ranks make the same number of steps. The last step of an epoch may
    be shorter; a rank without a sample then gets the first one of the step, with weight 0.0.

    Every iteration is a new epoch and must be made on all ranks. `loader.set_epoch(n)` sets the epoch of the next one.

    DDP averages over ranks, so samples of a smaller part count more. For a loss that is a mean over samples,
    `(loss * loader.loss_weight).backward()` gives the gradient of one process. The weight is 1.0 in steps with equal
    parts. If those of any step differ in size, rank 0 logs a warning.

    Args:
        dataset: With `__len__` and `__getitem__`; the same on all ranks.
        batch_size: Samples in a step of the one-process script. The options `global_batch="scale"` and
            `batch_size_per_gpu` of `enable_multi_gpu` apply here as well.
        shuffle: Use a new order in each epoch.
        seed: Seed of the order.
        drop_last: Leave out a last step that is shorter.
        loader_options: Arguments of each rank's DataLoader: `collate_fn`, `num_workers` and so on.

    Raises:
        ConfigError: A step or the data set has fewer samples than there are ranks, or the data set has no length.
        SetupError: This process is one of several ranks, and `enable_multi_gpu` was not called.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} has no length, so ranks cannot share its samples by index.",
            hint="Give a data set with __len__ and __getitem__.",
        )
    manager = _manager()
    config, rank, world_size = manager.config, manager.identity.rank, manager.identity.world_size
    step_samples = config.batch_size_per_gpu or batch_size
    if not config.keeps_global_batch:
        step_samples *= world_size
    if step_samples < world_size or (len(dataset) < world_size and not drop_last):
        raise ConfigError(
            f"A step of {step_samples} and a data set of {len(dataset)} sample(s) cannot be shared by {world_size} "
            "rank(s).",
            hint=f'Use {world_size} samples or more in batch_size and data set, global_batch="scale", or fewer GPUs.',
        )
    # With one replica, since every rank draws all samples, and takes its part of each batch.
    order: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)
    steps = BatchSampler(order, step_samples, drop_last)
    loader = DistributedLoader(dataset, steps, rank, world_size, **loader_options)
    # Only the last step differs from the others.
    rows = [loader.rows(step) for step in {0, len(loader) - 1}] if len(loader) else []
    if rank == 0 and (uneven := [of_ranks for of_ranks in rows if len(set(of_ranks)) > 1]):
        logger.warning(
            "ranks have %s samples in some steps: multiply the loss by loader.loss_weight for the gradient of one "
            "process",
            " + ".join(map(str, uneven[0])),
        )
    return loader


class DistributedLoader(DataLoader[Any]):
    """Loads this rank's batches; see `unsloth_multigpu.distributed_loader`.

    Attributes:
        loss_weight: Weight of the mean loss of the last batch yielded, so that the average over ranks is the mean over
            the step: 1.0 if all ranks have the same number of samples, 0.0 on a rank that has none.
    """

    def __init__(self, dataset: Any, steps: BatchSampler, rank: int, world_size: int, **options: Any) -> None:
        self.loss_weight = 1.0
        self._epoch = 0
        self._steps, self._rank, self._world_size = steps, rank, world_size
        super().__init__(dataset, batch_sampler=SharedBatches(steps, rank, world_size, None), **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        order: Any = self._steps.sampler
        order.set_epoch(self._epoch)
        self._epoch += 1
        # Here and not in the sampler, which is ahead of the batches with workers.
        for step, batch in enumerate(super().__iter__()):
            rows = self.rows(step)
            self.loss_weight = rows[self._rank] * self._world_size / sum(rows)
            yield batch

    def rows(self, step: int) -> list[int]:
        """Returns the number of samples of each rank in a step, in the order of the ranks."""
        size = self._steps.batch_size
        return rows_of_ranks(min(size, len(self.dataset) - step * size), self._world_size)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, from which later ones count on."""
        self._epoch = epoch


def _manager() -> DDPManager:
    """Returns the manager of the session, or without a session that of a single process.

    Raises:
        SetupError: This process is one of several ranks, and `enable_multi_gpu` was not called.
    """
    if (session := plugin.active_session()) is not None:
        return session.manager()
    is_in_group = dist.is_initialized() and dist.get_world_size() > 1
    identity = read_identity(os.environ)
    if is_in_group or (identity is not None and identity.world_size > 1):
        raise SetupError(
            "This process is one of several ranks, and enable_multi_gpu() was not called.",
            hint="Call it as the first line of the script: it joins the ranks that another launcher has started.",
        )
    return DDPManager(SINGLE_PROCESS, MultiGPUConfig.resolve({}))
