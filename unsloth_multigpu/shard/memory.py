"""How much memory each rank of a training needs, replicated or sharded, and which of the two fits. Pure.

The bytes of a step are counted, see `count`; docs/memory.md says what is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.words import GIB, in_gib

Mode = Literal["ddp", "sharded"]
# The share of a device's memory that has to stay free, for fragmentation and for errors of the forecast.
RESERVE = 0.15
# What a device holds outside of torch's allocator: the context with its kernels, and NCCL's buffers.
CONTEXT_BYTES, NCCL_BYTES = GIB * 3 // 4, GIB // 2
MAX_RANKS = 4096


@dataclass(frozen=True)
class Training:
    """What a script would train.

    Args:
        model: Name of the model's class.
        num_parameters: Elements of its parameters; a shared one counts once.
        num_trainable: Those that the optimizer changes.
        num_quantised: Those that bitsandbytes has packed.
        optimizer: `TrainingArguments.optim`, or the class of the script's own.
        autocast: dtype of mixed precision; "" = none.
        checkpointing: Gradient checkpointing is on.
        rows: Samples of a micro-batch.
        tokens: Of its longest sample; 0 = not known before samples are collated.
        accumulation: Micro-batches of a step of one process.
        keeps_batch: Several ranks share the samples of one process's step; False = each takes as many.
        offload: Where the model is sharded, a rank's part lies in the host's memory.
        num_sharing: Ranks that share each sample, `sequence_parallel`; one process has whole ones.
        only_whole: Why the model cannot be sharded, and what to do about it; ("", "") = it can.
        notes: What was assumed, one sentence each.
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
    only_whole: tuple[str, str] = ("", "")
    notes: tuple[str, ...] = ()

    def on_ranks(self, num_ranks: int) -> tuple[int, int]:
        """Rows of a micro-batch and number of micro-batches for each of `num_ranks` ranks."""
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
        """True if a step has a sample for each rank or group, without which the ranks refuse to train."""
        return not self.keeps_batch or self.rows * self.accumulation >= self.num_groups(num_ranks)


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a step of one rank allocates, as counted.

    Args:
        weights: Parameters and buffers.
        divided: Those of them that are sharded.
        gradients: After the backward pass.
        optimizer: States that the optimizer keeps.
        peak: The peak of forward and backward, beside weights and states.
        update: The peak of the optimizer's step, beside weights, states and gradients.
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
        num_ranks: Ranks of the run.
        weights: Parameters and buffers.
        gradients: Of the trainable parameters.
        optimizer: States that the optimizer keeps.
        activations: All else at the peak: what autograd keeps, gathered layers, or what the update needs.
        overhead: Named: what lies outside of torch's allocator.
        host: Of this rank in the host's memory, with `shard_offload`.
    """

    mode: Mode
    num_ranks: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    overhead: tuple[tuple[str, int], ...]
    host: int = 0

    @property
    def overhead_bytes(self) -> int:
        """The sum of `overhead`."""
        return sum(num_bytes for _, num_bytes in self.overhead)

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.overhead_bytes


def forecast_of(step: StepBytes, training: Training, mode: Mode, num_ranks: int) -> MemoryForecast:
    """The memory of one of `num_ranks` ranks, by what was counted of its step."""
    is_sharded = mode == "sharded"
    moves = is_sharded and training.offload
    return MemoryForecast(
        mode=mode,
        num_ranks=num_ranks,
        weights=step.weights - step.divided if moves else step.weights,
        gradients=0 if moves else step.gradients,
        optimizer=0 if moves else step.optimizer,
        activations=max(0, step.peak - step.gradients, 0 if moves else step.update),
        overhead=(("context", CONTEXT_BYTES), *([("NCCL", NCCL_BYTES)] if num_ranks > 1 else [])),
        host=step.divided + step.gradients + step.optimizer + step.update if moves else 0,
    )


def fits(wanted: MemoryForecast, device_bytes: int) -> bool:
    """True if `RESERVE` of the device stays free.

    Args:
        wanted: What a rank needs.
        device_bytes: Memory of the smallest device.
    """
    return wanted.total <= usable_bytes(device_bytes)


def usable_bytes(device_bytes: int) -> int:
    """The memory of a device without the reserve."""
    return int(device_bytes * (1 - RESERVE))


def decide(
    training: Training, forecasts: Sequence[MemoryForecast], num_ranks: int, device_bytes: int
) -> tuple[Mode, str]:
    """Chooses DDP where it fits, else sharding.

    Args:
        training: Of the script.
        forecasts: DDP's first; then, where that does not fit, sharded ones: on `num_ranks`, and on more ranks up to
            the first that fits.
        num_ranks: Ranks of the run.
        device_bytes: Memory of the smallest device.

    Returns:
        The mode, and one line with the figures.

    Raises:
        SetupError: Neither fits; says how many devices would do.
    """
    whole, *others = forecasts
    of = in_gib(device_bytes)
    needs = f"DDP needs {in_gib(whole.total)} GiB of {of}"
    if fits(whole, device_bytes):
        return "ddp", f"{needs}: not sharded"
    why, hint = training.only_whole
    if why:
        raise SetupError(f"{needs}, and {why}.", hint=hint)
    for parts in (row for row in others if (row.mode, row.num_ranks) == ("sharded", num_ranks)):
        needs += f", sharded over {num_ranks} ranks {in_gib(parts.total)}"
        if fits(parts, device_bytes):
            return "sharded", f"{needs}: sharded"
    raise SetupError(
        f"{needs}; of {of} GiB {in_gib(usable_bytes(device_bytes))} can be planned for.",
        hint=f"{would_do(forecasts, device_bytes)} Fewer or shorter samples in a micro-batch, "
        "gradient_checkpointing=True, load_in_4bit=True, an 8-bit optimizer or shard_offload=True need less; "
        "shard='on' or 'off' trains without this check.",
    )


def would_do(forecasts: Sequence[MemoryForecast], device_bytes: int) -> str:
    """The first of them that fits, as a sentence."""
    found = next((row for row in forecasts if fits(row, device_bytes)), None)
    if found is None:
        return "No number of GPUs of this size would do that a step has samples for."
    gpus = f"{found.num_ranks} GPU{'s' if found.num_ranks > 1 else ''} of this size would do"
    return f"{gpus}, sharded." if found.mode == "sharded" else f"{gpus}."
