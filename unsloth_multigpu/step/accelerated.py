"""Loops with an `Accelerator` of the script's own: ranks share each batch, and steps are those of one process.

By itself, accelerate gives each rank whole batches. Here it prepares loaders as in one process, with this rank's rows
of each batch, and steps a learning rate schedule once for each optimizer step.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from wrapt import ObjectProxy

from unsloth_multigpu.deal.one_process import StateOfOne
from unsloth_multigpu.deal.sampler import with_batches
from unsloth_multigpu.errors import DivergenceError, SetupError
from unsloth_multigpu.library import is_library
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.seam import instance_attribute, steered
from unsloth_multigpu.wire.digest import digest_of

if TYPE_CHECKING:
    from unsloth_multigpu.group.manager import DDPManager

logger = get_logger(__name__)

_SCALE = 'global_batch="scale" leaves the batches to accelerate.'


def rows_of_ranks(num_rows: int, world_size: int) -> list[int]:
    """Returns the number of rows of a batch for each rank. If they cannot be equal, the first ranks have one more."""
    return [num_rows // world_size + (rank < num_rows % world_size) for rank in range(world_size)]


def steer_loop(
    accelerator: Any, config: MultiGPUConfig, manager: Callable[[], DDPManager], told: set[str], module: str
) -> Callable[[], None]:
    """Makes loops with a new accelerator compute the steps of one process, or warns that a library's loop does not.

    It does nothing if the script uses `split_batches`, or parallelism other than data parallelism.

    Args:
        told: Messages about such loops that were logged in this process.
        module: Name of the module that made the accelerator.

    Returns:
        A function that restores the accelerator. It holds no reference to it, so that its models can be freed.
    """
    if not _shares_data(accelerator):
        return lambda: None
    loop = _Loop(accelerator, config, manager, told)
    if is_library(module):
        loop.stack.enter_context(steered(accelerator, "backward", loop.backward_of_library))
    else:
        settings = copy.copy(accelerator.dataloader_config)
        settings.split_batches = True  # A schedule steps once, and a stream's batch is shared.
        loop.stack.enter_context(instance_attribute(accelerator, "dataloader_config", settings))
        loop.stack.enter_context(instance_attribute(accelerator, "state", loop.state))
        for name in ("prepare_data_loader", "backward", "gather"):
            loop.stack.enter_context(steered(accelerator, name, getattr(loop, name)))
    found = weakref.ref(loop)

    def leave() -> None:
        if (kept := found()) is not None:
            kept.stack.close()

    return leave


def _shares_data(accelerator: Any) -> bool:
    """True if accelerate would give each rank separate batches."""
    parallelism = getattr(accelerator, "parallelism_config", None)  # Not in every version.
    if accelerator.split_batches or not (parallelism is None or parallelism.non_data_parallel_size == 1):
        return False
    kind = str(accelerator.distributed_type.value)
    return accelerator.num_processes > 1 and kind.startswith(("MULTI_", "FSDP"))


class SharedBatches(BatchSampler):
    """Yields this rank's rows of each batch of another sampler, which all ranks iterate.

    All its batches except the last have `batch_size` rows. A rank without a row takes the first row of the batch, with
    weight 0 (see `_Loop`). `check_same` is called with the first batch of each pass.
    """

    even_batches = False  # Read by `Accelerator.join_uneven_inputs`.

    def __init__(
        self, batches: Any, rank: int, world_size: int, check_same: Callable[[Iterable[Any]], None] | None
    ) -> None:
        # accelerate reads these attributes, and may replace the sampler.
        self.batch_sampler = batches
        self.sampler: Any = getattr(batches, "sampler", None)
        self.batch_size: int = batches.batch_size
        self.drop_last = getattr(batches, "drop_last", False)
        self._rank = rank
        self._world_size = world_size
        self._check_same = check_same
        # Rows of the latest batch, over all ranks.
        self.num_drawn = self.batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        self.num_drawn = self.batch_size
        for index, batch in enumerate(self.batch_sampler):
            if self.num_drawn != self.batch_size:
                raise SetupError(
                    f"{type(self.batch_sampler).__name__} gives a batch of {self.num_drawn} rows before the end of a "
                    f"pass, but its batch_size is {self.batch_size}.",
                    hint=f"Only the last batch may have another size. {_SCALE}",
                )
            if index == 0 and self._check_same is not None:
                self._check_same(batch)
            self.num_drawn = len(batch)
            rows = rows_of_ranks(len(batch), self._world_size)
            start = sum(rows[: self._rank])
            yield list(batch[start : start + rows[self._rank]] or batch[:1])

    def __len__(self) -> int:
        return len(self.batch_sampler)


class _CountedState(ObjectProxy):  # type: ignore[type-arg]
    """A state of accelerate whose `num_processes` is 1 outside loops over data loaders.

    Scripts multiply schedules and learning rates by it, which must stay those of one process. Inside a loop it is the
    real number, because scripts divide a loss by a count gathered from all ranks, and multiply it by this number.
    """

    gradient_state: Any = None
    was_read_in_loop = False

    @property
    def num_processes(self) -> int:
        if not self.gradient_state.in_dataloader:
            return 1
        self.was_read_in_loop = True
        return int(self.__wrapped__.num_processes)


class _Loop:
    """The overrides on one accelerator of the script."""

    def __init__(
        self, accelerator: Any, config: MultiGPUConfig, manager: Callable[[], DDPManager], told: set[str]
    ) -> None:
        self._accelerator = accelerator
        self._config = config
        self._manager = manager
        self._rank: int = accelerator.process_index
        self._world_size: int = accelerator.num_processes
        self._told = told
        self.stack = ExitStack()
        self._real_state = accelerator.state
        self.state = _CountedState(self._real_state)
        self.state.gradient_state = accelerator.gradient_state

    def backward_of_library(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Overrides `Accelerator.backward` in a library's loop: warns that a step is larger than in one process.

        The library's code expects that accelerate gives each rank separate batches, so this is not changed.
        """
        # The batches of a loader that accelerate has not prepared are not known.
        if self._accelerator.gradient_state.in_dataloader:
            self._warn(
                "accelerate gives each rank whole batches: an optimizer step sees "
                f"{self._world_size} times the samples of one process",
                "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)) keeps the step; "
                "global_batch='scale' accepts the larger one.",
            )
        original(*args, **kwargs)

    def prepare_data_loader(self, original: Callable[..., Any], data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Accelerator.prepare_data_loader`: the ranks share each batch, or SetupError is raised."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return original(data_loader, *args, **kwargs)
        batches = data_loader.batch_sampler
        size = getattr(batches, "batch_size", None)
        if size is None:
            raise SetupError(
                f"{type(batches).__name__} has no batch_size, so ranks cannot share its batches.",
                hint=f"Give the data loader a batch size. {_SCALE}",
            )
        if isinstance(data_loader.dataset, IterableDataset) or self._accelerator.dispatch_batches:
            # accelerate reads it on rank 0 or on each rank, and splits its batches into equal parts.
            if size % self._world_size:
                raise SetupError(
                    f"batch_size={size}: accelerate shares the batches of {type(data_loader.dataset).__name__} in "
                    f"equal parts, and there are {self._world_size} ranks.",
                    hint=f"Set a multiple of {self._world_size}, or another num_gpus. {_SCALE}",
                )
            with instance_attribute(self._accelerator, "state", self._real_state):
                return original(data_loader, *args, **kwargs)
        is_in_order = type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler
        check_same = None if is_in_order else self._check_same
        mine = with_batches(data_loader, SharedBatches(batches, self._rank, self._world_size, check_same))
        with instance_attribute(self._accelerator, "state", StateOfOne(self._real_state)):
            prepared = original(mine, *args, **kwargs)
        prepared._drop_last = data_loader.drop_last
        if not is_in_order:
            # All ranks follow rank 0's order: accelerate synchronizes this generator at the start of a pass.
            prepared.rng_types = [*(prepared.rng_types or ()), "torch"]
        return prepared

    def backward(self, original: Callable[..., None], loss: Any, **kwargs: Any) -> None:
        """Overrides `Accelerator.backward`: weights the mean over a rank's rows by their number."""
        if (rows := self._rows()) is None:
            self._warn_of_other_batches()
            return original(loss, **kwargs)
        batch = f"a batch of {sum(rows)} rows is {' + '.join(map(str, rows))} on {self._world_size} ranks"
        if len(set(rows)) == 1:
            if not self._told:
                self._tell(f"{batch}: exact where the loss is a mean over rows. Nothing is compared in such a loop")
            return original(loss, **kwargs)
        weight = rows[self._rank] * self._world_size / sum(rows)
        if self.state.was_read_in_loop and rows[self._rank]:
            weight = 1.0  # The loop itself divides its loss by rows or tokens of all ranks.
            self._tell(f"{batch}: the loop reads num_processes, so its losses are not weighted")
        else:
            self._tell(f"{batch}: losses are weighted as means over these rows")
        return original(loss * weight, **kwargs)

    def gather(self, original: Callable[..., Any], tensor: Any) -> Any:
        """Overrides `Accelerator.gather`: gathers each row of an uneven batch once, in the order of one process."""
        rows = self._rows()
        if rows is None or len(set(rows)) == 1:
            return original(tensor)
        from accelerate.utils.operations import recursively_apply

        return recursively_apply(functools.partial(self._gather_rows, original, rows), tensor)

    def _gather_rows(self, original: Callable[..., Any], rows: list[int], tensor: torch.Tensor) -> torch.Tensor:
        held = [] if not tensor.ndim else self._manager().gather_json(len(tensor))
        if held != [max(num, 1) for num in rows]:
            gathered: torch.Tensor = original(tensor)  # Not one value for each row.
            return gathered
        filled = tensor.new_zeros(max(rows), *tensor.shape[1:])
        filled[: len(tensor)] = tensor
        parts = original(filled).split(max(rows))
        return torch.cat([part[:num] for part, num in zip(parts, rows, strict=True)])

    def _rows(self) -> list[int] | None:
        """Returns the rows of each rank in the current batch; None if the loop reads no loader of this class."""
        loader = self._accelerator.gradient_state.active_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        while sampler is not None and not isinstance(sampler, SharedBatches):
            sampler = getattr(sampler, "batch_sampler", None)  # Of `skip_first_batches`.
        if sampler is None:
            return None
        # The sampler is ahead of the loop. Only the last batch is shorter.
        num_rows = sampler.num_drawn if loader.end_of_dataloader else sampler.batch_size
        return rows_of_ranks(num_rows, self._world_size)

    def _warn_of_other_batches(self) -> None:
        """Warns about batches that this class does not share."""
        state = self._accelerator.gradient_state
        if not state.in_dataloader:
            self._tell("the loop reads no loader that was prepared: an optimizer step sees what each rank reads itself")
        if state.end_of_dataloader and state.remainder > 0 and (over := state.remainder % self._world_size):
            self._warn(
                f"the last batch of a stream has {state.remainder} rows, and accelerate repeats "
                f"{self._world_size - over} to share it by {self._world_size} ranks",
                "Set drop_last=True.",
            )

    def _check_same(self, batch: Iterable[Any]) -> None:
        digests = self._manager().gather_json(digest_of([str(i) for i in batch]))
        if any(theirs != digests[0] for theirs in digests):
            raise DivergenceError(
                "The ranks draw different batches from the same data loader.",
                hint="Let the sampler draw from torch's generator, and give all ranks the same seed: "
                "set_seed(seed, device_specific=True) cannot be combined with use_seedable_sampler.",
            )

    def _warn(self, what: str, hint: str) -> None:
        """Warns that this is not the training of one process; raises SetupError if `inexact="raise"`."""
        if self._config.inexact == "raise":
            raise SetupError(f"{what}.", hint=hint)
        self._tell(f"{what}. {hint}")

    def _tell(self, text: str) -> None:
        if text not in self._told and self._rank == 0:
            self._told.add(text)
            logger.warning("%s", text)
