"""SerialTrainer: the legacy way to use several devices, one process whose replicas compute one after the other.

It is slower than one device, and is kept so that it can be compared against. The loop stays Hugging Face's.

Imported inside functions only.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import num_bytes
from unsloth_multigpu.group.replicas import persistent_buffers
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.report import RankReport, RunReport
from unsloth_multigpu.step.loss import AUTO, GATHERED, WHOLE, LossReduction, count_of, find_reduction, has_router_loss
from unsloth_multigpu.train.loop import Loop

logger = get_logger(__name__)

# Values of a batch: tensors, and what all shards share.
_CUT_OR_SHARED = (torch.Tensor, bool, int, float, str, type(None))
HINT = "Leave enable_ddp=False, the legacy path, out: DDP trains in one process per device."


class SerialTrainer(Part):
    """One training of one Trainer, with a deep copy of the model on each further device. Legacy.

    Each micro-batch is cut into shards of rows. Their gradients are copied to the CPU, added up there and copied back
    into the model's `.grad`; the model itself is replica 0, and is sent to the others before every optimizer step.
    That is the gradient of one device, to rounding. Dropout masks are other ones than there, and
    batch normalisation sees a shard at a time.

    Args:
        trainer: A `transformers.Trainer` or subclass. Its loss is a mean over rows or tokens, or a sum divided by the
            step's tokens; of one that a script wrote, `loss_reduction` says it.

    Attributes:
        moved_bytes: Gradients to the CPU and back, and weights to the replicas.
        report: Figures of the training, once it is over; None where one device had nothing to cut.
    """

    place = "feed"

    def __init__(self, trainer: TrainerLike, config: MultiGPUConfig) -> None:
        self.trainer = trainer
        self.config = config
        self.moved_bytes = 0
        self.report: RunReport | None = None
        self._devices: list[torch.device] = []
        self._replicas: list[nn.Module] = []
        self._reduction: LossReduction | None = None
        # Device and factor of the shard that is computed now.
        self._shard: tuple[torch.device, float] | None = None
        self._is_weighed = False
        self._num_steps = self._num_samples = self._num_shards = 0

    def run(self, original_train: Callable[[], Any]) -> Any:
        """Runs `original_train` on all devices, and returns its result.

        Raises:
            SetupError: The training cannot be cut into shards, or the model cannot be copied.
        """
        trainer = self.trainer
        self._devices = find_devices(trainer.args.device, self.config.num_gpus)
        if len(self._devices) == 1:
            logger.info("legacy serial path (enable_ddp=False): one device, so there is nothing to cut")
            return original_train()
        _refuse_what_cannot_work(trainer, self._devices)
        logger.info(
            "legacy serial path (enable_ddp=False): %d replicas compute one after the other on %s; one device alone is "
            "faster",
            len(self._devices),
            ", ".join(map(str, self._devices)),
        )
        start = time.monotonic()
        try:
            with Loop(trainer, [self]).steering():
                result = original_train()
        finally:
            self._replicas.clear()
        counts: dict[str, Any] = dict(num_steps=self._num_steps, num_samples=self._num_samples)
        counts |= dict(num_micro_batches=self._num_shards, sent_bytes=self.moved_bytes)
        mine = RankReport(rank=0, train_s=time.monotonic() - start, **counts)
        self.report = RunReport((mine,))
        logger.info("legacy serial path: %s", self.report.summary("moved {:.1f} MB to and from the replicas"))
        return result

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step, "compute_loss": self._compute_loss}

    def on_step_begin(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        # Not after the optimizer's step: callbacks that come later may change the weights once more.
        self.send_weights()

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._num_steps += 1

    def send_weights(self) -> None:
        """Copies the model's trained weights and persistent buffers to the replicas."""
        for replica in self._replicas[1:]:
            trained = zip(self._replicas[0].parameters(), replica.parameters(), strict=True)
            buffers = zip(persistent_buffers(self._replicas[0]), persistent_buffers(replica), strict=True)
            pairs = [*(pair for pair in trained if pair[0].requires_grad), *((a, b) for (_, a), (_, b) in buffers)]
            for source, target in pairs:
                target.data.copy_(source.data)
                self.moved_bytes += num_bytes(source)

    def _training_step(
        self, original: Callable[..., torch.Tensor], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Overrides `Trainer.training_step`: computes each shard on its replica, then adds up the gradients."""
        if not self._replicas or self._replicas[0] is not model:
            self._replicas[:] = [model, *(copy_of(model, device) for device in self._devices[1:])]
        parameters = list(model.parameters())
        # The model's own gradients are also those of this step's earlier micro-batches.
        total: list[torch.Tensor | None] = [None] * len(parameters)
        losses = []
        # Fewer rows than replicas are fewer shards.
        for replica, device, (shard, factor) in zip(self._replicas, self._devices, self._cut(inputs), strict=False):
            self._shard, self._is_weighed = (device, factor), False
            try:
                # Kernels written in Triton run on the current device, wherever their tensors are.
                with getattr(torch, device.type).device(device) if device.type in KINDS else nullcontext():
                    loss = original(replica, shard, *args, **kwargs)
            finally:
                self._shard = None
            if not self._is_weighed:
                name = type(self.trainer).__name__
                raise SetupError(f"{name}.training_step() calls no compute_loss(): shards have no weight.", hint=HINT)
            self._num_shards += 1
            gradients = take_gradients(replica)
            if any(p.grad is not None for p in parameters) or all(gradient is None for gradient in gradients):
                raise SetupError(
                    "A copy of the model computes nothing of its own: a function in it is bound to the model that it "
                    "was copied from, or the loss is computed with another model.",
                    hint=HINT,
                )
            total = [self._added(*pair) for pair in zip(total, gradients, strict=True)]
            losses.append(loss.to(self.trainer.args.device))
        for parameter, gradient in zip(parameters, total, strict=True):
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype)
                self.moved_bytes += num_bytes(parameter.grad)
        return torch.stack(losses).sum()

    def _compute_loss(self, original: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kw: Any) -> Any:
        """Overrides `Trainer.compute_loss`: runs on the shard's device, and multiplies by the shard's factor."""
        from accelerate.utils import send_to_device

        if self._shard is None:  # An evaluation.
            return original(model, inputs, *args, **kw)
        self._is_weighed = True
        device, factor = self._shard
        inputs, args, kw = send_to_device((inputs, args, kw), device)
        result = original(model, inputs, *args, **kw)
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    def _added(self, total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a sum on the CPU, in float32 or more."""
        if gradient is None:
            return total
        self.moved_bytes += num_bytes(gradient)
        gradient = gradient.to("cpu", torch.promote_types(gradient.dtype, torch.float32), copy=True)
        return gradient if total is None else total.add_(gradient)

    def _cut(self, inputs: Any) -> list[tuple[Any, float]]:
        """Returns shards of rows, each with the factor of its loss."""
        rows = count_rows(inputs)
        self._num_samples += rows
        if rows == 1:
            return [(inputs, 1.0)]
        pieces = cut_rows(inputs, min(rows, len(self._devices)))
        self._reduction = reduction = self._reduction or self._find_reduction()
        weighed = [(piece, self._weight(reduction, piece)) for piece in pieces]
        # A shard without a label adds nothing, and its mean would be no number.
        weighed = [(piece, weight) for piece, weight in weighed if weight]
        # Of a sum over tokens, a shard's loss is divided by those of the whole step already.
        whole = sum(weight for _, weight in weighed)
        is_sum = reduction.is_token_normalised
        return [(piece, 1.0 if is_sum else weight / whole) for piece, weight in weighed] or [(inputs, 1.0)]

    def _find_reduction(self) -> LossReduction:
        """Returns the loss reduction, by the class of the trainer or by the option."""
        reduction = find_reduction(self.trainer, self.config.loss_reduction)
        if reduction.kind in (AUTO, WHOLE, GATHERED):
            raise SetupError(
                f"loss_reduction={reduction.kind!r}: a micro-batch cannot be cut into shards, because it is not known "
                "how their losses make up its own.",
                hint=f"Set loss_reduction='row_mean' or 'token_mean' where it is one. {HINT}",
            )
        return reduction

    def _weight(self, reduction: LossReduction, piece: Mapping[str, Any]) -> float:
        """Returns the weight of a shard: its labelled tokens, or what else the loss averages over."""
        # transformers 4 does not say that a loss does not shift.
        counted = "next tokens" if getattr(self.trainer, "_loss_shifts_labels", True) else "tokens"
        return (count_of(piece, counted) or 0.0) if reduction.is_token_normalised else reduction.count(piece)


def count_rows(inputs: Any) -> int:
    """Returns the rows of a micro-batch. Raises SetupError if it cannot be split."""
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    lengths = {len(value) for value in values if _has_rows(value)}
    others = {type(value).__name__ for value in values if not isinstance(value, _CUT_OR_SHARED)}
    if others or len(lengths) != 1 or 0 in lengths:
        raise SetupError(
            f"A batch can be cut if it is a mapping of tensors with the same number of rows; this one is a "
            f"{type(inputs).__name__} of {sorted([*map(str, lengths), *others])}.",
            hint=HINT,
        )
    return lengths.pop()


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def cut_rows(inputs: Mapping[str, Any], num_shards: int) -> list[dict[str, Any]]:
    """Splits a micro-batch into contiguous shards whose sizes differ by at most one row."""
    parts = {name: v.tensor_split(num_shards) if _has_rows(v) else [v] * num_shards for name, v in inputs.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(num_shards)]


def _refuse_what_cannot_work(trainer: TrainerLike, devices: Sequence[torch.device]) -> None:
    args, model = trainer.args, trainer.model
    authors = [c for c in type(trainer).__mro__ if c.__module__.startswith(("trl.", "unsloth", "Unsloth"))]
    losses = [c.__name__.removeprefix("_Unsloth") for c in authors if "compute_loss" in vars(c)]
    places = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # torch's, inside accelerate's.
    problems = {
        "a Trainer of a distributed run, or of nn.DataParallel": args.n_gpu > 1
        or str(trainer.accelerator.distributed_type.value) != "NO",
        "auto_find_batch_size=True": args.auto_find_batch_size,
        "a schedule-free optimizer, which keeps other weights for an evaluation": "schedule_free" in args.optim
        or callable(getattr(optimizer, "train", None)),
        "a trainer that generates its samples": hasattr(args, "steps_per_generation"),
        f"{type(trainer).__name__}, whose rows belong together": any(name != "SFTTrainer" for name in losses),
        "a mixture of experts with a router's loss, which depends on the whole micro-batch": has_router_loss(trainer),
        f"a model that is spread over {sorted(places)}": len(places) > 1,
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        raise SetupError(f"enable_ddp=False cannot train {found[0]}.", hint=HINT)


def find_devices(first: torch.device, num_gpus: int | None) -> list[torch.device]:
    """Returns the devices for the replicas of a model on `first`.

    Without `num_gpus` these are all visible devices, or the CPU once.

    Raises:
        SetupError: Fewer devices are visible than `num_gpus`.
    """
    if first.type not in KINDS:
        return [first] * (num_gpus or 1)
    indices = range(torch.accelerator.device_count())
    devices = [first, *(torch.device(first.type, i) for i in indices if i != (first.index or 0))]
    if num_gpus is not None and num_gpus > len(devices):
        raise SetupError(
            f"num_gpus={num_gpus}, but {len(devices)} GPU(s) are visible.",
            hint=f"Set num_gpus={len(devices)}, or CUDA_VISIBLE_DEVICES.",
        )
    return devices[:num_gpus]


def copy_of(model: nn.Module, device: torch.device) -> nn.Module:
    """Returns a deep copy on `device`, with the same weights and settings.

    Raises:
        SetupError: Something in the model cannot be copied, or moved.
    """
    name = type(model).__name__
    copies: dict[int, Any] = {}  # By the id of the original.
    try:
        replica = copy.deepcopy(model, copies)
        replica = replica if device == next(model.parameters()).device else replica.to(device)
    # For example locks, handles, tensors with a graph, and quantized weights that cannot be moved.
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise SetupError(f"{name} cannot be copied to {device}: {error}", hint=HINT) from error
    for module in replica.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, (FunctionType, MethodType)):
                vars(module)[attribute] = _rebound(value, copies)
    pairs = list(zip(model.parameters(), replica.parameters(), strict=True))
    if any(mine is its or its.device != device or mine._backward_hooks for mine, its in pairs):
        raise SetupError(f"{name} cannot be copied to {device}: some weights are shared or have hooks.", hint=HINT)
    return replica


def _rebound(value: Any, copies: dict[int, Any]) -> Any:
    """Returns a function like `value` that refers to the copies instead of the originals.

    deepcopy() does not copy functions, so modules and methods in their closures remain the originals. TRL's SFTTrainer
    has the model's own `forward` in a closure.
    """
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(_rebound(value.__func__, copies), copies.get(id(value.__self__), value.__self__))
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    # A function may refer to itself.
    copies[id(value)] = value
    contents = [cell.cell_contents for cell in value.__closure__]
    found = [copies[id(one)] if id(one) in copies else _rebound(one, copies) for one in contents]
    cells = tuple(CellType(content) for content in found)
    function = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    function.__kwdefaults__ = value.__kwdefaults__
    vars(function).update(vars(value))
    return function


def take_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Returns the gradient of each parameter, in order, and removes it from the model."""
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return gradients
