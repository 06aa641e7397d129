"""Functions for training loops without a Trainer: the model in DDP, and a data loader.

They work in ranks that `enable_multi_gpu` has started or joined, and in one process.
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
    from unsloth_multigpu.plain.plain_loop import DistributedLoader


def wrap_model_multi_gpu(model: nn.Module, *, find_unused_parameters: bool = False) -> nn.Module:
    """Moves a model to this rank's device and wraps it in DistributedDataParallel.

    DDP copies rank 0's weights to all ranks and averages their gradients. All ranks must make the call; it opens the
    process group if necessary. In one process the model is not wrapped. A wrapped model is returned unchanged.

    Create the optimizer after this call, since moving a model may replace its parameters. Layers that use the whole
    batch, such as BatchNorm, see each rank's part only.

    After `torch.manual_seed(0)` in the script all ranks draw the same dropout masks. For different ones call
    `torch.manual_seed(seed + rank)` after wrapping.

    Args:
        model: A module with a parameter that requires a gradient.
        find_unused_parameters: Argument of DDP: True if a step may leave a parameter without a gradient.

    Raises:
        SetupError: No parameter requires a gradient, or an option of `enable_multi_gpu` needs a Trainer.
    """
    from unsloth_multigpu.plain.plain_loop import wrap_model

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
    """Returns a `torch.utils.data.DataLoader` of this rank's part of each step.

    The steps are those of a one-process loader with the same seed: `batch_size` samples, which the ranks share in
    order. All ranks make the same number of steps. The last step of an epoch may be shorter; a rank without a sample
    gets one again, with weight 0.0.

    Every iteration is a new epoch and must be made on all ranks. `loader.set_epoch(n)` sets the next one.

    DDP averages over ranks. If the ranks' parts of a step differ by a sample, `(loss * loader.loss_weight).backward()`
    gives the gradient of one process for a loss that is a mean over samples. Otherwise the weight is 1.0. A warning
    says if parts differ.

    Args:
        dataset: With `__len__` and `__getitem__`; the same on all ranks.
        batch_size: Batch size of the one-process script. The options `global_batch="scale"` and `batch_size_per_gpu` of
            `enable_multi_gpu` apply here as well.
        shuffle: Use a new order in each epoch.
        seed: Seed of the order.
        drop_last: Leave out a last step that is shorter.
        loader_options: Arguments of each rank's DataLoader: `collate_fn`, `num_workers` and so on.

    Raises:
        ConfigError: A step or the data set has fewer samples than there are ranks, or the data set has no length.
    """
    from unsloth_multigpu.plain.plain_loop import distributed_loader as make_loader

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
    """Returns the session's manager, or that of a single process.

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
