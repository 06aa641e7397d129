"""Buffers of a model that change while ranks train: running statistics as in one process, all equal on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsloth_multigpu.group.manager import DDPManager
from unsloth_multigpu.group.replicas import tensor_hashes
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.step.deal import Piece
from unsloth_multigpu.step.feed import StepFeed
from unsloth_multigpu.step.step import MicroBatch, Step
from unsloth_multigpu.trainer_protocol import ArgumentsLike, ControlLike, StateLike, TrainerLike
from unsloth_multigpu.wire.digest import digest_int64

logger = get_logger(__name__)

_NUM_NAMED = 4
# The square of a number of calls that differs between micro-batches by less is rounding.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Place:
    """Where a piece of a step belongs in the one-process run.

    Args:
        reference: The micro-batch that it is, or is a part of.
        share: Its part of that micro-batch.
        is_whole: True where it is that micro-batch.
    """

    reference: int
    share: float
    is_whole: bool


def place_of(piece: Piece, batch_size: int, num_references: int) -> Place:
    """Finds the place of a piece; an approximation where it has rows of several micro-batches.

    Args:
        piece: No filler.
        batch_size: Rows of a micro-batch of the one-process run.
        num_references: Its micro-batches in this step.
    """
    first, num_rows = piece.positions[0], len(piece.positions)
    if piece.share < 1.0 or piece.reference or not first:
        return Place(piece.reference, piece.share, is_whole=piece.share == 1.0)
    # Regrouped rows do not tell their micro-batch. The second part of a short last micro-batch that was cut does not
    # begin where a micro-batch does, which says that it is not a whole one.
    reference = min(sum(piece.positions) // num_rows // batch_size, num_references - 1)
    is_row_of_rows = piece.positions == tuple(range(reference * batch_size, reference * batch_size + num_rows))
    is_whole = is_row_of_rows and (num_rows == batch_size or reference == num_references - 1)
    return Place(reference, 1.0 if is_whole else num_rows / batch_size, is_whole)


class RunningStatistics(Part):
    """Gives all ranks, after each step, the running statistics of `BatchNorm` that one process would have.

    Each micro-batch in training makes `r <- (1 - momentum) r + momentum s` of its own statistics `s`, one after the
    other. What a micro-batch adds, `r_after - (1 - momentum) r_before`, does not depend on `r`. So each rank weighs
    what its micro-batches added by how many came after them in one process, and the sum over ranks is the same `r`.
    Exact where micro-batches are whole; of parts, the mean is and the variance is not, and a warning says so once.

    Cost: one all-reduce per step of two numbers for each channel, where a model has such layers; else none.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
        steps: What deals the micro-batches.
    """

    place = "statistics"

    def __init__(self, trainer: TrainerLike, manager: DDPManager, steps: StepFeed) -> None:
        self._trainer = trainer
        self._manager = manager
        self._steps = steps
        self._model: nn.Module | None = None
        self._layers: list[_BatchNorm] = []
        self._places: dict[int, Place] = {}
        self._num_references = 0
        self._keep = self._is_average = self._added = self._sums = torch.empty(0)
        self._has_warned = False

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._step}

    def _find_layers(self) -> list[_BatchNorm]:
        model = self._trainer.model
        if model is not self._model:  # `train()` may have made a new one.
            self._model = model
            self._layers = [
                m
                for m in model.modules()
                if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm) and m.running_mean is not None
            ]
        return self._layers

    def _step(self, original: Callable[..., Any], model: nn.Module, step: Step, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.training_step` of a whole step. Collective, where the model has such layers."""
        if not self._find_layers():
            return original(model, step, *args, **kwargs)
        self._places = {}
        self._num_references = 0
        for part in (step.left_over, step):
            if part is not None:
                self._note_places(part)
        start, counts = self._values(), self._counts()
        # What each value keeps of itself where a batch is added to it. Layers without a momentum average over all.
        momenta = [m.momentum for m in self._layers]
        self._keep = self._of_values(start.new_tensor([1.0 - (m or 0.0) for m in momenta]))
        self._is_average = self._of_values(start.new_tensor([float(m is None) for m in momenta])) > 0
        # Of each layer: calls, and their squares; then micro-batches, and parts of some.
        self._added, self._sums = torch.zeros_like(start), start.new_zeros(2 * len(self._layers) + 2)
        result = original(model, step, *args, **kwargs)
        total = self._manager.sum_tensor(torch.cat([self._added, self._sums]))
        self._write(start, counts, total[: len(start)], total[len(start) :])
        return result

    def _note_places(self, step: Step) -> None:
        for micro_batch in step.micro_batches:
            if not micro_batch.piece.is_filler:
                place = place_of(micro_batch.piece, self._trainer._train_batch_size, step.num_references)
                reference = self._num_references + place.reference
                self._places[id(micro_batch)] = Place(reference, place.share, place.is_whole)
        self._num_references += step.num_references

    def micro_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.training_step` of one micro-batch: keeps what it adds to the statistics."""
        if not self._layers:
            return original(*args, **kwargs)
        current: MicroBatch | None = self._steps.current
        place = self._places.get(id(current))
        before, counts = self._values(), self._counts()
        result = original(*args, **kwargs)
        if place is None:  # A filler, whose statistics are overwritten.
            return result
        after, calls = self._values(), self._counts() - counts
        count, num_calls = self._of_values(counts), self._of_values(calls)
        num_later = num_calls * (self._num_references - 1 - place.reference)
        moving = (after - self._keep**num_calls * before) * self._keep**num_later
        averaged = (count + num_calls) * after - count * before
        self._added += place.share * torch.where(self._is_average, averaged, moving)
        of_step = calls.new_tensor([place.share, float(not place.is_whole)])
        self._sums += torch.cat([place.share * calls, place.share * calls * calls, of_step])
        return result

    def _write(self, start: torch.Tensor, counts: torch.Tensor, added: torch.Tensor, sums: torch.Tensor) -> None:
        """Sets the statistics of this rank to those of all micro-batches of the step."""
        num_layers = len(self._layers)
        weight, num_parts = sums[-2], sums[-1]
        calls, squares = sums[:num_layers] / weight, sums[num_layers:-2] / weight
        num_calls = (calls * self._num_references).round()
        count, per_value = self._of_values(counts), self._of_values(num_calls)
        moving = self._keep**per_value * start + added
        averaged = (count * start + added) / (count + per_value).clamp(min=1.0)
        values = torch.where(self._is_average, averaged, moving)
        parts = values.split([m.num_features for m in self._layers for _ in range(2)])
        with torch.no_grad():
            for layer, mean, variance, num_batches in zip(
                self._layers, parts[::2], parts[1::2], counts + num_calls, strict=True
            ):
                for buffer, value in (
                    (layer.running_mean, mean),
                    (layer.running_var, variance),
                    (layer.num_batches_tracked, num_batches),
                ):
                    assert buffer is not None
                    buffer.copy_(value)
        if self._has_warned:
            return  # Do not wait for the device.
        if bool(num_parts > 0):
            self._warn("micro-batches are shared or regrouped")
        elif bool(((squares - calls**2).abs() > _ROUNDING).any()):
            self._warn("micro-batches call a layer different numbers of times")

    def _warn(self, reason: str) -> None:
        self._has_warned = True
        if self._manager.identity.rank == 0:
            logger.warning(
                "the running statistics of %d BatchNorm layer(s) are not exactly those of one process: %s. They are "
                "exact where no micro-batch is shared: gradient_accumulation_steps a multiple of %d, and no "
                "incomplete step",
                len(self._layers),
                reason,
                self._manager.identity.world_size,
            )

    def _values(self) -> torch.Tensor:
        """Means and variances of all layers in one flat copy, in 32 bits."""
        parts = [t for m in self._layers for t in (m.running_mean, m.running_var) if t is not None]
        return torch.cat([t.detach().flatten().float().to(parts[0].device) for t in parts])

    def _counts(self) -> torch.Tensor:
        """How often each layer was called in training; floats, where `_values` lies."""
        first = self._layers[0].running_mean
        assert first is not None
        # Kept on the device: reading each value would wait for the device.
        counts = [m.num_batches_tracked for m in self._layers if m.num_batches_tracked is not None]
        return torch.stack([c.to(first.device) for c in counts]).float()

    def _of_values(self, of_layers: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([2 * m.num_features for m in self._layers], device=of_layers.device)
        return of_layers.repeat_interleave(sizes)


class MicroBatchStatistics(Part):
    """The side of `RunningStatistics` that sees micro-batches."""

    place = "micro-batch statistics"

    def __init__(self, statistics: RunningStatistics) -> None:
        self._statistics = statistics

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._statistics.micro_batch}


class EqualBuffers(Part):
    """Makes the buffers that a checkpoint keeps equal on all ranks before an evaluation and at the end of a training.

    What each rank changes by its own samples cannot be put together in general: rank 0's values count, as with DDP, and
    a line names them. All are compared by hashes, and only those that differ are sent.

    Args:
        trainer: A `transformers.Trainer` or subclass.
        manager: This rank's manager.
    """

    place = "buffers"

    def __init__(self, trainer: TrainerLike, manager: DDPManager) -> None:
        self._trainer = trainer
        self._manager = manager
        self._at_begin: dict[str, Any] = {}
        self._named: set[str] = set()

    def overrides(self) -> dict[str, Override]:
        return {"evaluation_loop": self._evaluation_loop}

    def on_train_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._at_begin = _facts(self._trainer.model)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluation_loop`, in which each rank computes its rows with its own buffers."""
        self.make_equal()
        return original(*args, **kwargs)

    def on_train_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        """Makes all equal, and names what ranks have changed alike: counters of forward passes, say. Collective."""
        self.make_equal()
        now = {name for name, fact in _facts(self._trainer.model).items() if self._at_begin.get(name) != fact}
        known = {name for name, module, _, _ in kept_buffers(self._trainer.model) if isinstance(module, _BatchNorm)}
        if changed := sorted(now - known - self._named):
            logger.info("buffers that training changed, by the samples of each rank: %s", _listed(changed))

    def make_equal(self) -> None:
        """Gives every rank rank 0's values of buffers that differ. Collective: one number where none does."""
        facts = _facts(self._trainer.model)
        text = json.dumps(facts)
        digests = self._manager.gather_int64([digest_int64(text.encode())])
        if all(row == digests[0] for row in digests):
            return
        first, *others = (json.loads(gathered) for gathered in self._manager.gather_texts(text))
        differ = [n for n in first if all(n in other for other in others) and any(o[n] != first[n] for o in others)]
        places = {name: (module, key) for name, module, key, _ in kept_buffers(self._trainer.model)}
        for name in differ:
            self._send(*places[name], *first[name][:2])
        new = [name for name in differ if name not in self._named]
        self._named.update(new)
        if new and self._manager.identity.rank == 0:
            logger.warning(
                "buffers of the model are not those of one process: each rank changes them by its own samples, and all "
                "have rank 0's now: %s",
                _listed(new),
            )

    def _send(self, module: nn.Module, key: str, shape: list[int], dtype: str) -> None:
        buffer, kind = module._buffers[key], getattr(torch, dtype)
        assert buffer is not None
        if list(buffer.shape) != shape or buffer.dtype != kind:  # One that grows.
            buffer = module._buffers[key] = torch.empty(shape, dtype=kind, device=buffer.device)
        self._manager.broadcast_tensors([buffer])


def kept_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Name, owner, the owner's name for it, and tensor of each plain buffer that a checkpoint keeps.

    Others are what each rank computes for itself, such as tables of positions. Nor those that DDP is to leave alone.
    """
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is None or key in module._non_persistent_buffers_set or name in ignored:
                continue
            if not buffer.is_meta and buffer.layout == torch.strided and not is_traceable_wrapper_subclass(buffer):
                yield name, module, key, buffer


def _facts(model: nn.Module) -> dict[str, list[Any]]:
    """Shape, dtype and hash of each buffer, as JSON values."""
    buffers = {name: buffer for name, _, _, buffer in kept_buffers(model)}
    return {
        name: [list(buffer.shape), str(buffer.dtype).removeprefix("torch."), fingerprint]
        for (name, buffer), fingerprint in zip(buffers.items(), tensor_hashes(list(buffers.values())), strict=True)
    }


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
