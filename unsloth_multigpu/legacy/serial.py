"""SerialTrainer: the legacy way to use several devices, in one process whose devices compute one after the other.

It is slower than one device, and is kept for comparison. The loop stays Hugging Face's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.accelerator import KINDS
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import num_bytes
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.part import ArgumentsLike, ControlLike, Override, Part, StateLike, TrainerLike
from unsloth_multigpu.report import RankReport, RunReport
from unsloth_multigpu.step.loss import AUTO, GATHERED, WHOLE, LossReduction, find_reduction, has_router_loss
from unsloth_multigpu.train.loop import Loop

logger = get_logger(__name__)

# Types of values in a batch: tensors are split, and every shard has all of the others.
_SPLIT_OR_SHARED = (torch.Tensor, bool, int, float, str, type(None))
HINT = "Leave enable_ddp=False out, which is the legacy path: DDP trains in one process per device."


class SerialTrainer(Part):
    """One training of one Trainer, whose micro-batches are computed on several devices in turn. Legacy.

    Each micro-batch is split into shards of rows, one for each device. For the shard of a further device, copies there
    replace the model's weights, and the gradient flows back through them into the model's `.grad`. The sum over shards
    is the gradient of one device, up to rounding. Dropout masks differ from those of one device, and batch
    normalization sees one shard at a time.

    Args:
        trainer: A `transformers.Trainer` or subclass. Its loss is a mean over rows or tokens, or a sum divided by the
            step's tokens; for a script's own loss, the option `loss_reduction` says which.

    Attributes:
        moved_bytes: Bytes of trained weights and buffers copied to further devices, and of gradients copied back.
        report: Figures of the training, once it is over; None with a single device.
    """

    place = "feed"

    def __init__(self, trainer: TrainerLike, config: MultiGPUConfig) -> None:
        self.trainer = trainer
        self.config = config
        self.moved_bytes = 0
        self.report: RunReport | None = None
        self._devices: list[torch.device] = []
        # Frozen weights and their copies, by device index and id of the weight, which is kept alive.
        self._frozen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._reduction: LossReduction | None = None
        # Device and loss factor of the shard that is computed now.
        self._shard: tuple[torch.device, float] | None = None
        self._is_weighted = False
        self._num_steps = self._num_samples = self._num_shards = 0

    def run(self, original_train: Callable[[], Any]) -> Any:
        """Runs `original_train` on all devices, and returns its result.

        Raises:
            SetupError: The training cannot be split into shards, or fewer devices are visible than `num_gpus`.
        """
        trainer = self.trainer
        self._devices = find_devices(trainer.args.device, self.config.num_gpus)
        if len(self._devices) == 1:
            logger.info("legacy serial path (enable_ddp=False): one device, so there is nothing to split")
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
            self._frozen.clear()
        counts: dict[str, Any] = dict(num_steps=self._num_steps, num_samples=self._num_samples)
        counts |= dict(num_micro_batches=self._num_shards, sent_bytes=self.moved_bytes)
        mine = RankReport(rank=0, train_s=time.monotonic() - start, **counts)
        self.report = RunReport((mine,))
        logger.info("legacy serial path: %s", self.report.summary("moved {:.1f} MB to and from the replicas"))
        return result

    def overrides(self) -> dict[str, Override]:
        return {"training_step": self._training_step, "compute_loss": self._compute_loss}

    def on_step_end(self, args: ArgumentsLike, state: StateLike, control: ControlLike, **kwargs: Any) -> None:
        self._num_steps += 1

    def _training_step(
        self, original: Callable[..., torch.Tensor], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Overrides `Trainer.training_step`: computes each shard on its device, where `.grad` adds up the gradients."""
        losses = []
        # If there are fewer rows than devices, there are fewer shards.
        for index, (device, (shard, factor)) in enumerate(zip(self._devices, self._split(inputs), strict=False)):
            self._shard, self._is_weighted = (device, factor), False
            try:
                with ExitStack() as stack:
                    if device.type in KINDS:
                        # Kernels written in Triton run on the current device, wherever their tensors are.
                        stack.enter_context(getattr(torch, device.type).device(device))
                    if index:
                        stack.enter_context(self._copies_in(model, index))
                    loss = original(model, shard, *args, **kwargs)
            finally:
                self._shard = None
            if not self._is_weighted:
                name = type(self.trainer).__name__
                raise SetupError(f"{name}.training_step() calls no compute_loss(): shards have no factor.", hint=HINT)
            self._num_shards += 1
            losses.append(loss.to(self.trainer.args.device))
        return torch.stack(losses).sum()

    @contextmanager
    def _copies_in(self, model: nn.Module, index: int) -> Iterator[None]:
        """Replaces all weights and buffers by copies on the device with this index, for a forward and backward pass."""
        tables: list[dict[str, Any]] = [
            table for module in model.modules() for table in (module._parameters, module._buffers)
        ]
        before = [dict(table) for table in tables]
        # By id, since modules may share a weight.
        originals = {id(tensor): tensor for table in before for tensor in table.values() if tensor is not None}
        copies = {key: self._copied(tensor, index) for key, tensor in originals.items()}
        try:
            for table in tables:
                table.update({name: copies[id(tensor)] for name, tensor in table.items() if tensor is not None})
            yield
        finally:
            for table, held in zip(tables, before, strict=True):
                table.clear()
                table.update(held)

    def _copied(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Returns a copy through which the gradient flows back. A frozen weight is copied once per training."""
        device, key = self._devices[index], (index, id(tensor))
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
            self._frozen.pop(key, None)
            self.moved_bytes += num_bytes(tensor) * (2 if tensor.requires_grad else 1)
            return tensor.to(device, copy=True)
        if key not in self._frozen:
            # A deep copy, because quantized weights have attributes besides their values.
            self._frozen[key] = tensor, copy.deepcopy(tensor).to(device)
        return self._frozen[key][1]

    def _compute_loss(self, original: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kw: Any) -> Any:
        """Overrides `Trainer.compute_loss`: runs on the shard's device, and multiplies its loss by its factor."""
        from accelerate.utils import send_to_device

        if self._shard is None:  # In an evaluation.
            return original(model, inputs, *args, **kw)
        self._is_weighted = True
        device, factor = self._shard
        inputs, args, kw = send_to_device((inputs, args, kw), device)
        result = original(model, inputs, *args, **kw)
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    def _split(self, inputs: Any) -> list[tuple[Any, float]]:
        """Returns shards of rows, each with the factor of its loss."""
        rows = count_rows(inputs)
        self._num_samples += rows
        if rows == 1:
            return [(inputs, 1.0)]
        count = min(rows, len(self._devices))
        # Contiguous shards whose sizes differ by at most one row.
        parts = {name: v.tensor_split(count) if _has_rows(v) else [v] * count for name, v in inputs.items()}
        shards = [{name: part[i] for name, part in parts.items()} for i in range(count)]
        self._reduction = reduction = self._reduction or self._find_reduction()
        if reduction.is_token_normalized:  # The loss of a shard is divided by the tokens of the whole step.
            return [(shard, 1.0) for shard in shards]
        weights = [reduction.count(shard) for shard in shards]
        weighted = zip(shards, weights, strict=True)
        # A shard without labels adds nothing, and its mean would be NaN.
        return [(shard, weight / sum(weights)) for shard, weight in weighted if weight] or [(inputs, 1.0)]

    def _find_reduction(self) -> LossReduction:
        """Returns how the trainer's loss is reduced, from its class or the option `loss_reduction`."""
        reduction = find_reduction(self.trainer, self.config.loss_reduction)
        if reduction.kind in (AUTO, WHOLE, GATHERED):
            raise SetupError(
                f"loss_reduction={reduction.kind!r}: a micro-batch cannot be split into shards, because it is not "
                "known how its loss results from those of the shards.",
                hint=f"Set loss_reduction='row_mean' or 'token_mean' if the loss is such a mean. {HINT}",
            )
        return reduction


def count_rows(inputs: Any) -> int:
    """Returns the number of rows in a micro-batch. Raises SetupError if it cannot be split into rows."""
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    lengths = {len(value) for value in values if _has_rows(value)}
    others = {type(value).__name__ for value in values if not isinstance(value, _SPLIT_OR_SHARED)}
    if others or len(lengths) != 1 or 0 in lengths:
        raise SetupError(
            f"A batch can be split if it is a mapping of tensors with the same number of rows; this one is a "
            f"{type(inputs).__name__} of {sorted([*map(str, lengths), *others])}.",
            hint=HINT,
        )
    return lengths.pop()


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _refuse_what_cannot_work(trainer: TrainerLike, devices: Sequence[torch.device]) -> None:
    args, model = trainer.args, trainer.model
    library_classes = [c for c in type(trainer).__mro__ if c.__module__.startswith(("trl.", "unsloth", "Unsloth"))]
    with_loss = [c.__name__.removeprefix("_Unsloth") for c in library_classes if "compute_loss" in vars(c)]
    devices_of_model = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # torch's, inside accelerate's.
    problems = {
        "a Trainer of a distributed run, or of nn.DataParallel": args.n_gpu > 1
        or str(trainer.accelerator.distributed_type.value) != "NO",
        "auto_find_batch_size=True": args.auto_find_batch_size,
        "a schedule-free optimizer, which keeps other weights for an evaluation": "schedule_free" in args.optim
        or callable(getattr(optimizer, "train", None)),
        "a trainer that generates its samples": hasattr(args, "steps_per_generation"),
        f"{type(trainer).__name__}, whose loss may depend on several rows": any(n != "SFTTrainer" for n in with_loss),
        "a mixture of experts with a router's loss, which depends on the whole micro-batch": has_router_loss(trainer),
        f"a model that is spread over {sorted(devices_of_model)}": len(devices_of_model) > 1,
        "recurrent layers": any(isinstance(module, nn.RNNBase) for module in model.modules()),
        "weights with hooks": any(p._backward_hooks for p in model.parameters()),
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        raise SetupError(f"enable_ddp=False cannot train {found[0]}.", hint=HINT)


def find_devices(first: torch.device, num_gpus: int | None) -> list[torch.device]:
    """Returns `first`, where the model is, and the devices of its replicas, `num_gpus` in all.

    None = all visible devices; on the CPU, the CPU once. Raises SetupError if fewer are visible.
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
