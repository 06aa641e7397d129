"""Evaluates as one process does: ranks share its batches whole, and each batch's numbers count by themselves."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.seam import instance_attribute, steered
from unsloth_multigpu.step.metrics import STORES
from unsloth_multigpu.step.share import Share
from unsloth_multigpu.trainer_protocol import TrainerLike

_PADDING = -100  # The loop's own.


class Evaluation:
    """One pass over an evaluation data set.

    accelerate fills up the last batches with rows from the start, whose losses and metrics then count; TRL gathers its
    metrics of all ranks' batches together. Here each batch is one of one process's, and what it gives is its own. A
    rank without one computes a filler, which counts nothing.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        share: What this rank computes.
        cuts_last: What the last batch gives is cut, as accelerate does in one process. `Seq2SeqTrainer` does without.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager, share: Share, *, cuts_last: bool) -> None:
        self._trainer = trainer
        self._manager = manager
        self._share = share
        self._cuts_last = cuts_last
        self._in_step = False
        self._num_done = self._num_rows = 0
        self._noted: list[dict[str, list[float]]] = []
        # Of the round that is computed: how many ranks have a batch, to how many rows this rank's is cut, and what the
        # loop gathers next.
        self._num_batches = 0
        self._rows_kept: int | None = None
        self._next: list[str] = []
        # What each batch has given, by name: of this round; and of all, where the loop is to keep them apart.
        self._round: dict[str, list[Any]] = {}
        self._apart: dict[str, list[Any]] = {}

    @contextmanager
    def on_trainer(self) -> Iterator[None]:
        """Replaces methods of the Trainer during the evaluation. Collective, where TRL collects metrics."""
        trainer, args = self._trainer, self._trainer.args
        with ExitStack() as stack:
            stack.enter_context(steered(trainer, "prediction_step", self._prediction_step))
            for name in ("gather", "gather_for_metrics", "reduce"):
                alone = functools.partial(self._unless_in_step, name)
                stack.enter_context(steered(trainer.accelerator, name, alone))
            stack.enter_context(steered(trainer.accelerator, "pad_across_processes", _as_it_is))
            stack.enter_context(instance_attribute(trainer, "gather_function", self._gathered))
            if trainer.compute_metrics is not None and (args.batch_eval_metrics or not args.eval_do_concat_batches):
                by_batch = functools.partial(self._compute_metrics, trainer.compute_metrics)
                stack.enter_context(instance_attribute(trainer, "compute_metrics", by_batch))
            yield
        trainer.gather_function = trainer.accelerator.gather_for_metrics
        if any(hasattr(trainer, store) for store in STORES):
            self._merge()

    def completed(self, output: Any) -> Any:
        """What the loop returns, with the batches and the number of rows of one process. Collective for a stream."""
        if not self._trainer.args.eval_do_concat_batches:
            kept = {name: self._apart[name] for name in ("predictions", "label_ids") if getattr(output, name)}
            output = output._replace(**kept)
        try:
            len(self._share.loader.dataset)
        except TypeError:  # The loop has counted this rank's.
            output = output._replace(num_samples=sum(row[0] for row in self._manager.gather_int64([self._num_rows])))
        return output

    def _unless_in_step(self, name: str, exchange: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.gather` and its like: in the loss of a batch each rank has a batch of its own."""
        if not self._in_step:
            return exchange(tensor, *args, **kwargs)
        is_number = isinstance(tensor, torch.Tensor) and tensor.dim() == 0
        return tensor[None] if is_number and name != "reduce" else tensor

    def _prediction_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.prediction_step`: keeps apart what the batch adds to TRL's metrics."""
        from accelerate.utils.operations import ignorant_find_batch_size

        identity, num_batches = self._manager.identity, self._share.turns.num_batches
        first = self._num_done * identity.world_size
        self._num_done += 1
        rest = math.inf if num_batches is None else num_batches - first
        self._num_batches = int(min(identity.world_size, rest))
        is_filler = identity.rank >= self._num_batches
        is_last = num_batches is not None and first + identity.rank == num_batches - 1
        self._rows_kept = self._share.rows_kept(inputs) if is_last and self._cuts_last else None
        self._num_rows += 0 if is_filler else ignorant_find_batch_size(inputs) or 0
        before = {name: (values, len(values)) for name, values in self._collected()}
        self._in_step = True
        try:
            loss, logits, labels = original(model, inputs, *args, **kwargs)
        finally:
            self._in_step = False
        self._note(before, is_filler=is_filler)
        # The order in which the loop gathers them.
        has_inputs = True if "inputs" in self._trainer.args.include_for_metrics else None
        found = {"losses": loss, "inputs": has_inputs, "predictions": logits, "label_ids": labels}
        self._next = [name for name, value in found.items() if value is not None]
        return loss, logits, labels

    def _gathered(self, values: Any) -> Any:
        """`Trainer.gather_function`: what the batches of this round give, one behind the other. Collective."""
        if self._in_step:
            return values
        from accelerate.utils.operations import recursively_apply
        from transformers.trainer_pt_utils import nested_numpify

        args, name = self._trainer.args, self._next.pop(0) if self._next else ""
        if (num_rows := self._rows_kept) is not None:
            values = recursively_apply(lambda tensor: tensor[:num_rows] if tensor.dim() else tensor, values)
        of_ranks = self._of_ranks(values)
        if args.batch_eval_metrics:
            self._round[name] = self._of_batches(values, of_ranks)
        if not args.eval_do_concat_batches:
            self._apart.setdefault(name, []).extend(map(nested_numpify, self._of_batches(values, of_ranks)))
        joined = iter([_joined(ranks, shapes[: self._num_batches]) for ranks, shapes in of_ranks])
        return recursively_apply(lambda _: next(joined), values)

    def _of_ranks(self, values: Any) -> list[tuple[torch.Tensor, list[tuple[int, ...]]]]:
        """For each tensor in `values` those of all ranks, filled up to one shape, and the shape of each. Collective."""
        from accelerate.utils.operations import recursively_apply

        tensors: list[torch.Tensor] = []
        recursively_apply(tensors.append, values)
        # They are asked: what a collator makes of rows may have any number of them.
        every = [iter(row) for row in self._manager.gather_int64([n for t in tensors for n in (t.dim(), *t.shape)])]
        found = []
        for tensor in tensors:
            shapes = [tuple(islice(sizes, 1 + tensor.dim()))[1:] for sizes in every]
            size = tuple(map(max, zip(*shapes, strict=True)))
            padded = tensor
            if size != tensor.shape:
                is_shorter = size[1:] == tensor.shape[1:]  # Rows are cut off again.
                padded = tensor.new_zeros(size) if is_shorter else tensor.new_full(size, _PADDING)
                padded[tuple(map(slice, tensor.shape))] = tensor
            gathered = self._trainer.accelerator.gather(padded.reshape(size or 1).contiguous())
            found.append((gathered.reshape(len(shapes), *size), shapes))
        return found

    def _of_batches(self, values: Any, of_ranks: Sequence[tuple[torch.Tensor, Sequence[tuple[int, ...]]]]) -> list[Any]:
        """What each batch of the round has in the place of `values`, in its own shape."""
        from accelerate.utils.operations import recursively_apply

        def of(rank: int) -> Any:
            own = iter([ranks[rank][tuple(map(slice, shapes[rank]))] for ranks, shapes in of_ranks])
            return recursively_apply(lambda _: next(own), values)

        return [of(rank) for rank in range(self._num_batches)]

    def _compute_metrics(self, original: Callable[..., Any], prediction: Any, **kwargs: Any) -> Any:
        """The script's `compute_metrics`, which gets the batches of one process where it is to have them apart."""
        given = {"losses": prediction.losses, "inputs": prediction.inputs}
        names = {"predictions", "label_ids", *(name for name, value in given.items() if value is not None)}
        if not self._trainer.args.batch_eval_metrics:
            return original(type(prediction)(**{name: self._apart[name] for name in names}), **kwargs)
        if prediction.inputs is not None:
            # All of them, where the loop has gathered the main one.
            self._round["inputs"] = self._of_batches(prediction.inputs, self._of_ranks(prediction.inputs))
        result = None
        is_end = self._num_done * self._manager.identity.world_size >= (self._share.turns.num_batches or math.inf)
        for i in range(self._num_batches):
            batch = type(prediction)(**{name: self._round[name][i] for name in names})
            result = original(batch, compute_result=is_end and i == self._num_batches - 1)
        return result

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


def _joined(ranks: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """The rows of the ranks that have a batch, one behind the other.

    Args:
        ranks: (ranks, rows, ...), or (ranks,) of single numbers.
        shapes: Of the ranks that have a batch.
    """
    mine = ranks[: len(shapes)]
    if ranks.dim() == 1:
        return mine
    if all(shape[0] == ranks.shape[1] for shape in shapes):
        return mine.flatten(0, 1)
    return torch.cat([rows[: shape[0]] for rows, shape in zip(mine, shapes, strict=True)])


def _as_it_is(_original: Any, tensor: Any, *_: Any, **__: Any) -> Any:
    """`Accelerator.pad_across_processes`: what batches give is padded where it is put together, as the loop does it."""
    return tensor
