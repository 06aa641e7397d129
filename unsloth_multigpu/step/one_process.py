"""What one process has, in a rank of several: its batches, read without another rank, and its number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from unsloth_multigpu.seam import Steered, instance_attribute, steered
from unsloth_multigpu.trainer_protocol import TrainerLike

# The loop of transformers, and what Unsloth makes of it: `_fast_inner_training_loop`.
_LOOP = "inner_training_loop"


def as_one_process(trainer: TrainerLike, loader: Any, *, is_placed: bool = False, is_seedable: bool = True) -> Any:
    """Prepares a loader as accelerate does for one process.

    Args:
        trainer: Whose options of accelerate count.
        loader: As the Trainer built it, not yet prepared.
        is_placed: Batches come to the Trainer's device.
        is_seedable: The order of a random sampler depends on seed and epoch alone, where accelerate is asked for that.
    """
    from accelerate.data_loader import prepare_data_loader

    accelerator = trainer.accelerator
    placing: dict[str, Any] = {"put_on_device": False}
    if is_placed:
        placing = {"put_on_device": True, "device": trainer.args.device}
        placing["non_blocking"] = accelerator.dataloader_config.non_blocking
    # Without `rng_types` and `dispatch_batches` no rank waits for another one.
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
def batches_of_one_process(trainer: TrainerLike) -> Iterator[None]:
    """Loaders that the Trainer builds while the context is open have the batches of one process."""

    def prepare(_original: Any, loader: Any, *_: Any, **__: Any) -> Any:
        return as_one_process(trainer, loader, is_placed=True)

    with steered(trainer.accelerator, "prepare_data_loader", prepare):
        yield


def is_for_a_training(trainer: TrainerLike) -> bool:
    """True where a loader is asked for by a training: one that we steer, or a loop that did not come by `train()`.

    Such a loop takes its share from accelerate. Nothing on the Trainer tells it from a script, so its name has to.
    """
    if isinstance(vars(trainer.accelerator).get("prepare_data_loader"), Steered):
        return True
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name.endswith(_LOOP) and frame.f_locals.get("self") is trainer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Alone:
    """A state of accelerate that says it is of one process; all else is the state's own."""

    def __init__(self, state: Any) -> None:
        object.__setattr__(self, "_state", state)

    num_processes = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state, name, value)


@contextmanager
def counted_as_one_process(trainer: TrainerLike) -> Iterator[None]:
    """`accelerator.num_processes` and `args.world_size` are 1 while the context is open, and nothing else changes.

    A loss of a script is then the one that it is in one process. Collectives still reach all ranks.
    """
    with ExitStack() as stack:
        for owner, name in ((trainer.accelerator, "state"), (trainer.args, "distributed_state")):
            if vars(owner).get(name) is not None:
                stack.enter_context(instance_attribute(owner, name, _Alone(vars(owner)[name])))
        yield
