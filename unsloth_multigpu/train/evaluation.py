"""Evaluates as one process does: ranks share its batches whole, and each batch's numbers count by themselves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.seam import instance_attribute, steered
from unsloth_multigpu.step.metrics import STORES
from unsloth_multigpu.trainer_protocol import TrainerLike


class _Rounds(BatchSampler):
    """The batches of one process, then the first ones again until all ranks have the same number: ranks meet in each.

    Args:
        batches: Of one process.
        num_ranks: Batch `i` is for rank `i % num_ranks`.
    """

    def __init__(self, batches: BatchSampler, num_ranks: int) -> None:
        self._batches = batches
        self._num_ranks = num_ranks
        self.sampler, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        first: list[int] = []
        for batch in self._batches:
            first = first or list(batch)
            yield batch
        for _ in range(len(self) - len(self._batches)):
            yield first

    def __len__(self) -> int:
        return -(-len(self._batches) // self._num_ranks) * self._num_ranks


class Evaluation:
    """One pass over an evaluation data set.

    accelerate fills up the last batches with rows from the start, whose losses and metrics then count; TRL gathers its
    metrics of all ranks' batches together. Here each batch is one of one process's, and its metrics are its own. A rank
    without one computes a filler, which counts nothing.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        loader: As accelerate prepared it.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager, loader: Any) -> None:
        self._trainer = trainer
        self._manager = manager
        self._loader = loader
        self._shard = loader.batch_sampler
        self._batches: BatchSampler = self._shard.batch_sampler
        # Without those that drop_last leaves out in one process.
        self._num_rows = min(len(self._batches.sampler), len(self._batches) * self._batches.batch_size)
        self._in_step = False
        self._num_rounds = -(-len(self._batches) // self._shard.num_processes)
        self._num_done = 0
        self._noted: list[dict[str, list[float]]] = []

    @contextmanager
    def on_trainer(self) -> Iterator[None]:
        """Replaces methods of the Trainer during the evaluation. Collective, where TRL collects metrics."""
        trainer, shard = self._trainer, self._shard
        rounds = _Rounds(self._batches, shard.num_processes)
        with ExitStack() as stack:
            stack.enter_context(instance_attribute(shard, "batch_sampler", rounds))
            stack.enter_context(instance_attribute(shard, "even_batches", False))
            stack.enter_context(steered(trainer, "prediction_step", self._prediction_step))
            for name in ("gather", "gather_for_metrics", "reduce"):
                alone = functools.partial(self._unless_in_step, name)
                stack.enter_context(steered(trainer.accelerator, name, alone))
            yield
        # The Trainer holds a reference to the method that was there before.
        trainer.gather_function = trainer.accelerator.gather_for_metrics
        if any(hasattr(trainer, store) for store in STORES):
            self._merge()

    def _unless_in_step(self, name: str, exchange: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.gather` and its like: in the loss of a batch each rank has a batch of its own."""
        if not self._in_step:
            return exchange(tensor, *args, **kwargs)
        is_number = isinstance(tensor, torch.Tensor) and tensor.dim() == 0
        return tensor[None] if is_number and name != "reduce" else tensor

    def _prediction_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.prediction_step`: keeps apart what the batch adds to TRL's metrics."""
        batch_index = self._num_done * self._shard.num_processes + self._shard.process_index
        num_batches, batch_size = len(self._batches), self._batches.batch_size
        last = self._num_rows - (num_batches - 1) * batch_size
        # Rows of the last round that count. The loader has counted the whole data set when its pass began.
        self._loader.remainder = self._num_rows % (self._shard.num_processes * batch_size)
        before = {name: (values, len(values)) for name, values in self._collected()}
        self._in_step = True
        try:
            loss, logits, labels = original(model, inputs, *args, **kwargs)
        finally:
            self._in_step = False
            self._num_done += 1
        self._note(before, is_filler=batch_index >= num_batches)
        if self._num_done == self._num_rounds and num_batches > 1 and last < batch_size:
            logits, labels = self._filled_up(inputs, logits, labels)
        return loss, logits, labels

    def _filled_up(self, inputs: Any, logits: Any, labels: Any) -> tuple[Any, Any]:
        """As many rows in the incomplete last batch as in those of other ranks. Collective, in the last round.

        The loop gathers them row by row, and cuts off the rows after the last one. It reads the inputs behind this
        step.
        """
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        has_inputs = "inputs" in self._trainer.args.include_for_metrics
        parts = (logits, labels, inputs[name] if has_inputs else None)
        if not (own := list(_lengths(parts))):
            return logits, labels  # Of prediction_loss_only.
        last_rank = (len(self._batches) - 1) % self._shard.num_processes
        # They are asked: what a collator lays end to end has one row, whatever the number of samples.
        lengths = self._manager.gather_int64(own)[last_rank - 1]
        if self._shard.process_index == last_rank:
            logits, labels, filled = _filled_up(parts, iter(lengths))
            if has_inputs:
                inputs[name] = filled
        return logits, labels

    def _collected(self) -> list[tuple[str, list[float]]]:
        found = []
        for attribute in STORES:
            stores = getattr(self._trainer, attribute, None)
            if isinstance(stores, Mapping) and "eval" in stores:
                found += [(f"{attribute}/{name}", values) for name, values in stores["eval"].items()]
        return found

    def _note(self, before: Mapping[str, tuple[list[float], int]], *, is_filler: bool) -> None:
        noted = {}
        for name, values in self._collected():
            old, num_old = before.get(name, ([], 0))
            # A list in the place of the old one holds a last value, as of a count.
            if name.endswith("/num_tokens") or (name in before and values is not old):
                continue
            noted[name] = [float(value) for value in values[num_old:]]
            del values[num_old:]  # They are added again together with those of all ranks.
        if not is_filler:
            self._noted.append(noted)

    def _merge(self) -> None:
        """Puts all batches' metrics into each rank's lists, in the order of one process."""
        ranks = [json.loads(text) for text in self._manager.gather_texts(json.dumps(self._noted))]
        for batch_index in range(max(map(len, ranks), default=0)):
            for noted in (rank[batch_index] for rank in ranks if batch_index < len(rank)):
                for name, values in noted.items():
                    attribute, _, metric = name.partition("/")
                    getattr(self._trainer, attribute)["eval"].setdefault(metric, []).extend(values)


def _lengths(values: Any) -> Iterator[int]:
    """Rows of each tensor, in order."""
    if isinstance(values, (tuple, list, Mapping)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _lengths(value)
    elif isinstance(values, torch.Tensor) and values.dim():
        yield len(values)


def _filled_up(values: Any, lengths: Iterator[int]) -> Any:
    """Repeats the last row of each tensor until it has its length of `lengths`, in the order of `_lengths`."""
    if isinstance(values, (tuple, list)):
        return type(values)([_filled_up(value, lengths) for value in values])
    if isinstance(values, Mapping):
        filled = {key: _filled_up(value, lengths) for key, value in values.items()}
        return type(values)(**filled) if hasattr(values, "to_tuple") else filled
    if not isinstance(values, torch.Tensor) or values.dim() == 0:
        return values
    num_more = next(lengths) - len(values)
    return torch.cat([values, values[-1:].expand(num_more, *values.shape[1:])]) if num_more > 0 else values


def evaluation_of(trainer: TrainerLike, manager: DDPManager, loader: Any) -> Evaluation | None:
    """The evaluation of a loader whose batches can be shared whole; None for others, which stay accelerate's.

    These are streams, batches of varying size, batches that accelerate splits, and trainers that generate samples.
    """
    from accelerate.data_loader import BatchSamplerShard

    shard = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard) or shard.split_batches or not shard.even_batches:
        return None
    batches = shard.batch_sampler
    if type(batches) is not BatchSampler or shard.num_processes != manager.identity.world_size:
        return None
    if hasattr(trainer.args, "steps_per_generation"):
        return None
    try:
        num_samples = len(batches.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None
    return Evaluation(trainer, manager, loader) if num_samples == len(loader.dataset) > 0 else None
