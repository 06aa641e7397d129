"""What the loop of a script without a Trainer calls: models, weights and data for the ranks that it runs in.

They work in ranks that `enable_multi_gpu` started or joined, and in one process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from unsloth_multigpu import plugin
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.wire.identity import SINGLE_PROCESS, read_identity

if TYPE_CHECKING:
    from torch import nn

    from unsloth_multigpu.group.manager import DDPManager
    from unsloth_multigpu.plain.loader import DistributedLoader


def wrap_model_multi_gpu(model: nn.Module, *, find_unused_parameters: bool = False) -> nn.Module:
    """Makes a model train on all ranks, and moves it to this rank's device.

    In a rank it becomes a DistributedDataParallel, which gives all ranks rank 0's weights and averages their gradients;
    all ranks must make the call, and the process group is opened if it is not open. In one process the model stays the
    module that it is. A model that is wrapped already is returned as it is.

    Build the optimizer after this call: a model that is moved may get new parameters. Layers that look at the whole
    batch, such as BatchNorm, see each rank's part.

    The option verify_every is the Trainer's. After `torch.manual_seed(0)` in the script all ranks
    draw the same dropout masks; call `torch.manual_seed(seed + rank)` after wrapping for others on each rank.

    Args:
        model: A module with a parameter that requires a gradient.
        find_unused_parameters: Given to DDP: True if a step may leave a parameter without a gradient.

    Raises:
        SetupError: The model has nothing to train; an option of `enable_multi_gpu` that only a
            Trainer can follow.
    """
    from unsloth_multigpu.plain.wrap import wrap_model

    wrapped = wrap_model(model, _manager(), find_unused_parameters=find_unused_parameters)
    if (session := plugin.active_session()) is not None:
        session.program.note_wrapper(wrapped)
    return wrapped


def distributed_loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    **loader_options: Any,
) -> DistributedLoader:
    """A `torch.utils.data.DataLoader` of this rank's part of each step.

    Each sample of an epoch counts in one step of one rank. Steps are those of the one-process loader with the same
    seed: `batch_size` samples, which the ranks share in order. All ranks make equally many steps. Samples that are left
    at the end of an epoch make a shorter step. A rank for which none is left gets one again, whose weight is 0.0.

    Every iteration shuffles again and must be made on all ranks; `loader.set_epoch(n)` continues with another epoch.

    DDP averages over ranks, so the mean loss of a rank counts as much as that of any other. Where a step does not
    divide by the ranks, parts differ by one sample; `(loss * loader.loss_weight).backward()` has the gradient of one
    process then, for a loss that is a mean over samples. Elsewhere the weight is 1.0. One line of the log tells.

    Args:
        dataset: With `__len__` and `__getitem__`; the same on all ranks.
        batch_size: That of the one-process script. The options `global_batch="scale"` and `batch_size_per_gpu` of
            `enable_multi_gpu` count here, too.
        shuffle: A new order for each epoch.
        seed: Of that order.
        drop_last: Leave out the samples that do not fill a step.
        loader_options: Given to each rank's DataLoader: `collate_fn`, `num_workers` and so on.

    Raises:
        ConfigError: A step or the data set has fewer samples than ranks, or no length.
    """
    from unsloth_multigpu.plain.loader import distributed_loader as make_loader

    manager = _manager()
    config = manager.config
    return make_loader(
        dataset,
        config.batch_size_per_gpu or batch_size,
        manager.identity,
        keeps_step=config.keeps_global_batch,
        drop_last=drop_last,
        shuffle=shuffle,
        seed=seed,
        **loader_options,
    )


def _manager() -> DDPManager:
    """The session's, else that of a process which works alone.

    Raises:
        SetupError: This process is one of several ranks, and `enable_multi_gpu` was not called.
    """
    if (session := plugin.active_session()) is not None:
        return session.manager()
    import torch.distributed as dist

    from unsloth_multigpu.group.manager import DDPManager

    is_in_group = dist.is_initialized() and dist.get_world_size() > 1
    identity = read_identity(os.environ)
    if is_in_group or (identity is not None and identity.world_size > 1):
        raise SetupError(
            "This process is one of several ranks, and enable_multi_gpu() was not called.",
            hint="Call it as the first line of the script: it joins the ranks that another launcher has started.",
        )
    return DDPManager(SINGLE_PROCESS, MultiGPUConfig.resolve({}))
