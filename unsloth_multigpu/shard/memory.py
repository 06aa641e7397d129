"""Forecasts the memory of a rank from the counted bytes of a step, and decides whether a model is sharded. Pure.

`count` counts the bytes. docs/memory.md lists what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.words import GIB, in_gib

Mode = Literal["ddp", "sharded"]
# The fraction of a device's memory that must stay free, for fragmentation and errors of the forecast.
RESERVE = 0.15
# Memory of a device outside torch's allocator: the CUDA context with its kernels, and NCCL's buffers.
CONTEXT_BYTES, NCCL_BYTES = GIB * 3 // 4, GIB // 2
# Hint of the errors about a forecast that cannot be made.
WITHOUT_FORECAST = "shard='on' or shard='off' needs no forecast."


@dataclass(frozen=True)
class Training:
    """What a script trains, and how.

    Args:
        model: Name of the model's class.
        num_parameters: Number of elements of its parameters; a shared parameter counts once.
        num_trainable: Those of trainable parameters.
        num_quantised: Those that bitsandbytes quantizes.
        optimizer: `TrainingArguments.optim`, or the class of the script's own optimizer.
        autocast: dtype of mixed precision; "" = none.
        checkpointing: Whether activations are checkpointed.
        rows: Number of samples in a micro-batch.
        tokens: Tokens of the longest sample; 0 = not known before samples are collated.
        accumulation: Number of micro-batches in a step of one process.
        keeps_batch: True = the ranks share the samples of one process's step; False = each rank has as many.
        offload: Shards are kept in host memory.
        num_sharing: Number of ranks that share each sample (`sequence_parallel`), if there are several.
        only_whole: Why the model cannot be sharded, and a hint; ("", "") = it can.
        notes: Assumptions, one sentence each.
    """

    model: str
    num_parameters: int
    num_trainable: int
    num_quantised: int
    optimizer: str
    autocast: str
    checkpointing: bool
    rows: int
    tokens: int
    accumulation: int
    keeps_batch: bool = True
    offload: bool = False
    num_sharing: int = 1
    only_whole: Sequence[str] = ("", "")
    notes: Sequence[str] = ()

    def on_ranks(self, num_ranks: int) -> tuple[int, int]:
        """Returns the samples of a micro-batch, and the micro-batches of a step, on each of `num_ranks` ranks."""
        if not self.keeps_batch:
            return self.rows, self.accumulation
        samples = -(-self.rows * self.accumulation // self.num_groups(num_ranks))
        rows = min(self.rows, samples)
        return rows, -(-samples // rows)

    def num_groups(self, num_ranks: int) -> int:
        """Returns the number of groups among which samples are dealt. The ranks of a group share each sample.

        Raises:
            SetupError: `num_ranks` is not a multiple of `num_sharing`.
        """
        if num_ranks > 1 and num_ranks % self.num_sharing:
            raise SetupError(
                f"{num_ranks} ranks are not a multiple of sequence_parallel={self.num_sharing}.",
                hint=f"Give multiples of it: --gpus {self.num_sharing},{2 * self.num_sharing}.",
            )
        return max(1, num_ranks // self.num_sharing)

    def has_samples(self, num_ranks: int) -> bool:
        """True if a step has a sample for each rank, or group of ranks. Otherwise the training is refused."""
        return not self.keeps_batch or self.rows * self.accumulation >= self.num_groups(num_ranks)


@dataclass(frozen=True)
class StepBytes:
    """Counted bytes of a step of one rank.

    Args:
        weights: Parameters and buffers.
        sharded: The sharded parameters among them.
        gradients: Gradients after the backward pass.
        optimizer: Optimizer states.
        peak: Peak of the forward and backward pass, without weights and optimizer states.
        update: Peak of the optimizer step, without weights, optimizer states and gradients.
    """

    weights: int
    sharded: int
    gradients: int
    optimizer: int
    peak: int
    update: int


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes of a rank at the peak of a step.

    Args:
        mode: "ddp" = every rank has the whole model; "sharded" = FSDP2 shards it.
        weights: Parameters and buffers.
        optimizer: Optimizer states.
        gradients: Gradients after the backward pass.
        activations: The rest at the peak: saved activations, gathered layers, or temporaries of the optimizer step.
        overhead: Bytes outside torch's allocator, by their use.
        host: Bytes of the rank in host memory, with `shard_offload`.
    """

    mode: Mode
    num_ranks: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    overhead: Mapping[str, int]
    host: int = 0

    @property
    def overhead_bytes(self) -> int:
        """The sum of `overhead`."""
        return sum(self.overhead.values())

    @property
    def total(self) -> int:
        """Bytes that are needed on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.overhead_bytes


def forecast_of(step: StepBytes, training: Training, mode: Mode, num_ranks: int) -> MemoryForecast:
    """Returns the memory of one of `num_ranks` ranks from the counted bytes of its step."""
    is_sharded = mode == "sharded"
    is_offloaded = is_sharded and training.offload
    return MemoryForecast(
        mode=mode,
        num_ranks=num_ranks,
        weights=step.weights - step.sharded if is_offloaded else step.weights,
        gradients=0 if is_offloaded else step.gradients,
        optimizer=0 if is_offloaded else step.optimizer,
        activations=max(0, step.peak - step.gradients, 0 if is_offloaded else step.update),
        overhead={"context": CONTEXT_BYTES, **({"NCCL": NCCL_BYTES} if num_ranks > 1 else {})},
        host=step.sharded + step.gradients + step.optimizer + step.update if is_offloaded else 0,
    )


def fits(forecast: MemoryForecast, device_bytes: int) -> bool:
    """True if `RESERVE` of the device stays free."""
    return forecast.total <= usable_bytes(device_bytes)


def usable_bytes(device_bytes: int) -> int:
    """Returns the memory of a device without the reserve."""
    return int(device_bytes * (1 - RESERVE))


def decide(training: Training, forecasts: Sequence[MemoryForecast], device_bytes: int) -> tuple[Mode, str]:
    """Chooses DDP if it fits, else sharding.

    Args:
        forecasts: That of DDP; if it does not fit, also those of sharding.
        device_bytes: Memory of the smallest device.

    Returns:
        The mode, and one line with the figures.

    Raises:
        SetupError: Neither fits.
    """
    ddp, *sharded = forecasts
    of = in_gib(device_bytes)
    needs = f"DDP needs {in_gib(ddp.total)} GiB of {of}"
    if fits(ddp, device_bytes):
        return "ddp", f"{needs}: not sharded"
    why, hint = training.only_whole
    if why:
        raise SetupError(f"{needs}, and {why}.", hint=hint)
    for forecast in sharded:
        needs += f", sharded over {forecast.num_ranks} ranks {in_gib(forecast.total)}"
        if fits(forecast, device_bytes):
            return "sharded", f"{needs}: sharded"
    raise SetupError(
        f"{needs}; {in_gib(usable_bytes(device_bytes))} of {of} GiB can be used, the rest is a reserve.",
        hint="To need less, use fewer or shorter samples in a micro-batch, gradient_checkpointing=True, "
        "load_in_4bit=True, an 8-bit optimizer or shard_offload=True. `unsloth-multigpu plan --gpus 8,16,32` forecasts "
        "more GPUs. shard='on' or 'off' trains without this check.",
    )
