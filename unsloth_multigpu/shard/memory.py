"""Forecasts the memory of a rank from the counted bytes of a step, and decides whether a model is sharded. Pure.

The bytes of a step are counted, see `count`; docs/memory.md lists what is not counted.
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
# Memory of a device outside torch's allocator: the context with its kernels, and NCCL's buffers.
CONTEXT_BYTES, NCCL_BYTES = GIB * 3 // 4, GIB // 2
# The hint of errors of a forecast.
WITHOUT_FORECAST = "shard='on' or shard='off' needs no forecast."


@dataclass(frozen=True)
class Training:
    """The training of a script.

    Args:
        model: Name of the model's class.
        num_parameters: Elements of its parameters; a shared one counts once.
        num_quantised: Elements that bitsandbytes has quantized.
        optimizer: `TrainingArguments.optim`, or the class of the script's own optimizer.
        autocast: dtype of mixed precision; "" = none.
        rows: Samples of a micro-batch.
        tokens: Tokens of its longest sample; 0 = not known before samples are collated.
        accumulation: Micro-batches of a step of one process.
        keeps_batch: Several ranks share the samples of one process's step; False = each has as many.
        offload: Shards are kept in host memory.
        num_sharing: Ranks that share each sample, `sequence_parallel`; one process has whole ones.
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
        """Returns the rows of a micro-batch and the number of micro-batches for each of `num_ranks` ranks."""
        if not self.keeps_batch:
            return self.rows, self.accumulation
        samples = -(-self.rows * self.accumulation // self.num_groups(num_ranks))
        rows = min(self.rows, samples)
        return rows, -(-samples // rows)

    def num_groups(self, num_ranks: int) -> int:
        """Among how many the samples of a step are dealt.

        Raises:
            SetupError: So many ranks cannot share samples.
        """
        if num_ranks > 1 and num_ranks % self.num_sharing:
            raise SetupError(
                f"sequence_parallel={self.num_sharing}, and {num_ranks} ranks do not divide by it.",
                hint=f"Ask for multiples of it: --gpus {self.num_sharing},{2 * self.num_sharing}.",
            )
        return max(1, num_ranks // self.num_sharing)

    def has_samples(self, num_ranks: int) -> bool:
        """True if a step has a sample for each rank or group. Otherwise the ranks refuse to train."""
        return not self.keeps_batch or self.rows * self.accumulation >= self.num_groups(num_ranks)


@dataclass(frozen=True)
class StepBytes:
    """Counted bytes of a step of one rank.

    Args:
        weights: Parameters and buffers.
        divided: The sharded parameters among them.
        gradients: Gradients after the backward pass.
        optimizer: Optimizer states.
        peak: Peak of forward and backward, without weights and states.
        update: Peak of the optimizer step, without weights, states and gradients.
    """

    weights: int
    divided: int
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
        activations: The rest at the peak: saved activations, gathered layers, or temporaries of the update.
        overhead: Bytes outside torch's allocator, by what uses them.
        host: This rank's bytes in host memory, with `shard_offload`.
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
        """Bytes of the device that are needed."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.overhead_bytes


def forecast_of(step: StepBytes, training: Training, mode: Mode, num_ranks: int) -> MemoryForecast:
    """Returns the memory of one of `num_ranks` ranks from the counted bytes of its step."""
    is_sharded = mode == "sharded"
    moves = is_sharded and training.offload
    return MemoryForecast(
        mode=mode,
        num_ranks=num_ranks,
        weights=step.weights - step.divided if moves else step.weights,
        gradients=0 if moves else step.gradients,
        optimizer=0 if moves else step.optimizer,
        activations=max(0, step.peak - step.gradients, 0 if moves else step.update),
        overhead={"context": CONTEXT_BYTES, **({"NCCL": NCCL_BYTES} if num_ranks > 1 else {})},
        host=step.divided + step.gradients + step.optimizer + step.update if moves else 0,
    )


def fits(wanted: MemoryForecast, device_bytes: int) -> bool:
    """True if `RESERVE` of the device stays free."""
    return wanted.total <= usable_bytes(device_bytes)


def usable_bytes(device_bytes: int) -> int:
    """Returns the memory of a device without the reserve."""
    return int(device_bytes * (1 - RESERVE))


def decide(training: Training, forecasts: Sequence[MemoryForecast], device_bytes: int) -> tuple[Mode, str]:
    """Chooses DDP if it fits, else sharding.

    Args:
        forecasts: DDP first; if that does not fit, also sharded.
        device_bytes: Memory of the smallest device.

    Returns:
        The mode, and one line with the figures.

    Raises:
        SetupError: Neither fits.
    """
    whole, *sharded = forecasts
    of = in_gib(device_bytes)
    needs = f"DDP needs {in_gib(whole.total)} GiB of {of}"
    if fits(whole, device_bytes):
        return "ddp", f"{needs}: not sharded"
    why, hint = training.only_whole
    if why:
        raise SetupError(f"{needs}, and {why}.", hint=hint)
    for parts in sharded:
        needs += f", sharded over {parts.num_ranks} ranks {in_gib(parts.total)}"
        if fits(parts, device_bytes):
            return "sharded", f"{needs}: sharded"
    raise SetupError(
        f"{needs}; {in_gib(usable_bytes(device_bytes))} of {of} GiB can be used, the rest is a reserve.",
        hint="Fewer or shorter samples in a micro-batch, gradient_checkpointing=True, load_in_4bit=True, an 8-bit "
        "optimizer or shard_offload=True need less; `unsloth-multigpu plan --gpus 8,16,32` counts it for more GPUs; "
        "shard='on' or 'off' trains without this check.",
    )
