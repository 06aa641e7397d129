"""Lets code in a rank see one process: the batches of one process, and a world size of 1."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from wrapt import ObjectProxy

from unsloth_multigpu.part import TrainerLike
from unsloth_multigpu.seam import Steered, instance_attribute, steered


def as_one_process(trainer: TrainerLike, loader: Any, *, is_placed: bool = False, is_seedable: bool = True) -> Any:
    """Prepares a loader as accelerate does for one process; `is_placed` moves batches to the Trainer's device."""
    from accelerate.data_loader import prepare_data_loader

    accelerator = trainer.accelerator
    placing: dict[str, Any] = {"put_on_device": False}
    if is_placed:
        placing = {"put_on_device": True, "device": trainer.args.device}
        placing["non_blocking"] = accelerator.dataloader_config.non_blocking
    # Without `rng_types` and `dispatch_batches` there are no collectives.
    return prepare_data_loader(
        loader,
        num_processes=1,
        process_index=0,
        dispatch_batches=False,
        use_seedable_sampler=is_seedable and accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        **placing,
    )


@contextmanager
def batches_of_one_process(
    trainer: TrainerLike, note: Callable[[Any, Callable[[], Any]], None] = lambda whole, divide: None
) -> Iterator[None]:
    """Gives loaders that the Trainer builds within the context the batches of one process.

    `note` is called with each of them, and with a function that returns accelerate's divided loader.
    """

    def prepare(divide: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
        whole = as_one_process(trainer, loader, is_placed=True)
        note(whole, functools.partial(divide, loader, *args, **kwargs))
        return whole

    with steered(trainer.accelerator, "prepare_data_loader", prepare):
        yield


def is_being_dealt(trainer: TrainerLike) -> bool:
    """True while the step feed builds the loader of a training, which it divides itself."""
    return isinstance(vars(trainer.accelerator).get("prepare_data_loader"), Steered)


class StateOfOne(ObjectProxy):  # type: ignore[type-arg]
    """accelerate's state, as in a single process."""

    num_processes = 1
    process_index = local_process_index = 0
    is_main_process = is_local_main_process = is_last_process = True


@contextmanager
def counted_as_one_process(trainer: TrainerLike) -> Iterator[None]:
    """Makes `accelerator` and `args` report rank 0 of one process while the context is open.

    A loss that reads them is then that of one process. Collectives still reach all ranks.
    """
    with ExitStack() as stack:
        for owner, name in ((trainer.accelerator, "state"), (trainer.args, "distributed_state")):
            if vars(owner).get(name) is not None:
                stack.enter_context(instance_attribute(owner, name, StateOfOne(vars(owner)[name])))
        yield


@contextmanager
def nothing_gathered(trainer: TrainerLike) -> Iterator[None]:
    """Makes `Accelerator.gather` and similar methods return the rank's own values while the context is open.

    TRL's losses gather metrics, and KTO its KL term. There ranks have different numbers of rows and micro-batches.
    """

    def own(_: Any, tensor: Any = None, *_others: Any, input_data: Any = None, **_more: Any) -> Any:
        return input_data if tensor is None else tensor  # The name of `gather_for_metrics` is `input_data`.

    with ExitStack() as stack:
        for name in ("gather", "gather_for_metrics", "reduce"):
            stack.enter_context(steered(trainer.accelerator, name, own))
        yield


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """Makes `torch.distributed` report no default process group while the context is open.

    A script that also trains in one process asks before it uses collectives. Libraries pass a group explicitly.
    """
    import torch.distributed as dist

    def of_one(original: Callable[..., int], answer: int, group: Any = None) -> int:
        return answer if group is None else original(group)

    with ExitStack() as stack:
        for name, answer in {"get_world_size": 1, "get_rank": 0}.items():
            told = functools.partial(of_one, getattr(dist, name), answer)
            stack.enter_context(instance_attribute(dist, name, told))
        stack.enter_context(instance_attribute(dist, "is_initialized", lambda: False))
        yield
