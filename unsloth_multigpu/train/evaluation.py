"""Evaluations with the results of one process: ranks share its batches, and use rank 0's buffers and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsloth_multigpu.deal.one_process import nothing_gathered
from unsloth_multigpu.deal.share import Share
from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.replicas import persistent_buffers, tensor_hashes
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import ArgumentsLike, ControlLike, GradientExchange, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.seam import instance_attribute, steered
from unsloth_multigpu.step.metrics import STORES, collected
from unsloth_multigpu.words import listed

logger = get_logger(__name__)

_PADDING = -100  # As in the Trainer's loop.


class Evaluation:
    """One pass over an evaluation data set.

    accelerate fills the last batches with rows from the start, which then count in losses and metrics, and TRL gathers
    its metrics over the batches of all ranks. Here each batch is a batch of one process. In the last round, a rank
    without a batch computes a filler, whose results are dropped.
    """

    def __init__(self, trainer: TrainerLike, manager: DDPManager, share: Share) -> None:
        self._trainer = trainer
        self._manager = manager
        self._share = share
        # accelerate truncates the results of the last batch, also in one process. `Seq2SeqTrainer` does not let it.
        self._cuts_last = trainer.gather_function != trainer.accelerator.gather
        self._num_done = self._num_rows = 0
        self._noted: list[dict[str, list[float]]] = []
        # In the current round: the number of ranks with a batch, and how many rows of this rank's to keep (None = all).
        self._num_batches = 0
        self._rows_kept: int | None = None

    def run(self, loop: Callable[[Any], Any]) -> Any:
        """Calls the Trainer's loop with this rank's loader. Collective if TRL collects metrics, and for a stream.

        Returns:
            The output of the loop, with the number of rows of one process.
        """
        trainer = self._trainer
        with ExitStack() as stack:
            stack.enter_context(steered(trainer, "prediction_step", self._prediction_step))
            # `_of_round` pads, as the loop does.
            stack.enter_context(
                steered(trainer.accelerator, "pad_across_processes", lambda _, tensor, *_1, **_2: tensor)
            )
            stack.enter_context(instance_attribute(trainer, "gather_function", self._gathered))
            output = loop(self._share.loader)
        trainer.gather_function = trainer.accelerator.gather_for_metrics
        if any(hasattr(trainer, store) for store in STORES):
            self._merge()
        try:
            len(self._share.loader.dataset)
        except TypeError:  # The loop has counted only this rank's rows.
            output = output._replace(num_samples=sum(self._manager.gather_json(self._num_rows)))
        return output

    def _prediction_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.prediction_step`: records what the batch adds to TRL's metrics."""
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
        before = {name: (values, len(values)) for name, values, _ in collected(self._trainer, "eval")}
        with ExitStack() as stack:
            stack.enter_context(nothing_gathered(self._trainer))
            stack.enter_context(instance_attribute(self._trainer, "gather_function", lambda values: values))
            loss, logits, labels = original(model, inputs, *args, **kwargs)
        self._note(before, is_filler=is_filler)
        return loss, logits, labels

    def _gathered(self, values: Any) -> Any:
        """Replaces `Trainer.gather_function`: concatenates the results of this round's batches. Collective."""
        from accelerate.utils.operations import recursively_apply

        if (num_rows := self._rows_kept) is not None:
            values = recursively_apply(lambda tensor: tensor[:num_rows] if tensor.dim() else tensor, values)
        joined = iter(self._of_round(values))
        return recursively_apply(lambda _: next(joined), values)

    def _of_round(self, values: Any) -> list[torch.Tensor]:
        """Returns, for each tensor in `values`, the rows of all ranks that have a batch. Collective."""
        from accelerate.utils.operations import recursively_apply

        tensors: list[torch.Tensor] = []
        recursively_apply(tensors.append, values)
        # Shapes are gathered, because a collator may return any number of rows.
        every = [iter(row) for row in self._manager.gather_json([n for t in tensors for n in (t.dim(), *t.shape)])]
        found = []
        for tensor in tensors:
            shapes = [tuple(islice(sizes, 1 + tensor.dim()))[1:] for sizes in every]
            size = tuple(map(max, zip(*shapes, strict=True)))
            padded = tensor
            if size != tensor.shape:
                is_shorter = size[1:] == tensor.shape[1:]  # Padded rows are cut off below.
                padded = tensor.new_zeros(size) if is_shorter else tensor.new_full(size, _PADDING)
                padded[tuple(map(slice, tensor.shape))] = tensor
            gathered = self._trainer.accelerator.gather(padded.reshape(size or 1).contiguous())
            ranks = gathered.reshape(len(shapes), *size)[: self._num_batches]
            pairs = zip(ranks, shapes[: self._num_batches], strict=True)
            # A tensor without dimensions is a loss.
            found.append(torch.cat([rows[: shape[0]] for rows, shape in pairs]) if size else ranks)
        return found

    def _note(self, before: Mapping[str, tuple[list[float], int]], *, is_filler: bool) -> None:
        noted = {}
        for name, values, _ in collected(self._trainer, "eval"):
            old, num_old = before.get(name, ([], 0))
            # A list that replaces the old one holds only the last value, such as a count.
            if name.endswith("/num_tokens") or (name in before and values is not old):
                continue
            noted[name] = [float(value) for value in values[num_old:]]
            del values[num_old:]  # `_merge` adds them together with those of all ranks.
        if not is_filler:
            self._noted.append(noted)

    def _merge(self) -> None:
        """Adds the metrics of all batches to each rank's lists, in the order of one process."""
        ranks = self._manager.gather_json(self._noted)
        for batch_index in range(max(map(len, ranks), default=0)):
            for noted in (rank[batch_index] for rank in ranks if batch_index < len(rank)):
                for name, values in noted.items():
                    attribute, _, metric = name.partition("/")
                    getattr(self._trainer, attribute)["eval"].setdefault(metric, []).extend(values)


class EqualEvaluations(Part):
    """Gives all ranks rank 0's buffers before an evaluation and after a training; gives callbacks rank 0's metrics.

    DDP copies rank 0's buffers at the start of a step, so they differ again after it. A warning names buffers that the
    training has changed: their values are not those of one process, because each rank has seen only its own samples.
    """

    place = "buffers"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, exchange: GradientExchange) -> None:
        super().__init__(trainer, manager)
        self._exchange = exchange
        self._at_begin: dict[str, int] = {}
        self._has_warned = False

    def overrides(self) -> dict[str, Override]:
        return {"evaluation_loop": self._evaluation_loop, "call_event": self._call_event}

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._at_begin = _hashes(self._buffers())

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Overrides `Trainer.evaluation_loop`, which uses each rank's own weights and buffers."""
        self._exchange.before_read()  # A callback may evaluate between two synchronizations.
        self.make_equal()
        return original(*args, **kwargs)

    def _call_event(self, original: Callable[..., Any], event: str, *args: Any, **kwargs: Any) -> Any:
        """Overrides `CallbackHandler.call_event`: callbacks such as early stopping see rank 0's metrics on all ranks.

        A script's own `evaluate` may have added numbers to the metrics of the loop.
        """
        if event == "on_evaluate":
            kwargs["metrics"].update(self._manager.broadcast_numbers(kwargs["metrics"]))
        return original(event, *args, **kwargs)

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self.make_equal()

    def make_equal(self) -> None:
        """Copies rank 0's buffers to all ranks. Collective if the model has buffers."""
        if not (buffers := self._buffers()):
            return
        if not self._has_warned and self._manager.identity.rank == 0:
            changed = [name for name, value in _hashes(buffers).items() if self._at_begin.get(name) != value]
            self._has_warned = bool(changed)
            if changed:
                logger.warning(
                    "training changes buffers of the model. They are not those of one process: each rank changes its "
                    "own by its samples, and rank 0's are used, as with DDP: %s",
                    listed(changed),
                )
        ranks = self._manager.gather_json({name: [list(b.shape), str(b.dtype)] for name, b in buffers.items()})
        # A buffer that has another shape on some rank stays as it is.
        alike = [name for name, form in ranks[0].items() if all(rank.get(name) == form for rank in ranks)]
        self._manager.broadcast_tensors([buffers[name] for name in alike])

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of the model by name, without those that DDP ignores."""
        model = self._trainer.model
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        return {
            name: buffer
            for name, buffer in persistent_buffers(model)
            if name not in ignored
            and not (buffer.is_meta or buffer.layout != torch.strided or is_traceable_wrapper_subclass(buffer))
        }


def _hashes(buffers: dict[str, torch.Tensor]) -> dict[str, int]:
    return dict(zip(buffers, tensor_hashes(list(buffers.values())), strict=True))
