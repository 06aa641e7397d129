"""How much memory each rank of a training needs, whole or sharded, and which of the two fits. Pure.

The bytes of a step are counted, see `count`; docs/memory.md says what is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.words import GIB

Mode = Literal["ddp", "sharded"]
# Of a device's memory, which a forecast has to leave free: for fragments, and since it may be wrong by as much.
RESERVE = 0.15
# A forecast that is further off from what the allocator saw is worth a word.
TOLERANCE = 0.15
# What a device holds beside torch's allocator: the context with its kernels, and NCCL's buffers among several ranks.
CONTEXT_BYTES, NCCL_BYTES = GIB * 3 // 4, GIB // 2
MOST_RANKS = 4096


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
        trains_parts: The optimizer can train a sharded model.
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
    trains_parts: bool = True
    notes: tuple[str, ...] = ()

    def on_ranks(self, num_ranks: int) -> tuple[int, int]:
        """Rows of a micro-batch, and micro-batches, of one of so many ranks."""
        if not self.keeps_batch:
            return self.rows, self.accumulation
        samples = -(-self.rows * self.accumulation // num_ranks)
        rows = min(self.rows, samples)
        return rows, -(-samples // rows)

    def has_samples(self, num_ranks: int) -> bool:
        """True if a step has a sample for each rank, without which the ranks refuse to train."""
        return not self.keeps_batch or self.rows * self.accumulation >= num_ranks


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a step of one rank was counted to allocate.

    Args:
        loaded: Of the whole model, before it is divided.
        weights: Parameters and buffers.
        divided: Those of them of which each rank has a part.
        gradients: After the backward pass.
        optimizer: States that the optimizer keeps.
        peak: The most during forward and backward, beside weights and states.
        update: The most during the optimizer's step, beside weights, states and gradients.
    """

    loaded: int
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
        mode: "ddp" = every rank has the whole model; "sharded" = FSDP2 divides it.
        num_ranks: Ranks of the run.
        weights: Parameters and buffers.
        gradients: Of the trainable parameters.
        optimizer: States that the optimizer keeps.
        activations: What comes on top of these at the peak: what autograd keeps, gathered layers, or what the update
            needs.
        overhead: Named: what lies outside of torch's allocator.
        loading: While the model is loaded, before it is divided.
        host: Of this rank in the host's memory, where `shard_offload` moves it there.
    """

    mode: Mode
    num_ranks: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    overhead: tuple[tuple[str, int], ...]
    loading: int = 0
    host: int = 0

    @property
    def overhead_bytes(self) -> int:
        """All that `overhead` names."""
        return sum(num_bytes for _, num_bytes in self.overhead)

    @property
    def allocated(self) -> int:
        """What torch's allocator should report as its peak."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.allocated + self.overhead_bytes


@dataclass(frozen=True)
class Decision:
    """How a run is to train.

    Args:
        mode: What was chosen.
        text: One line with the figures.
    """

    mode: Mode
    text: str


def forecast_of(step: StepBytes, training: Training, mode: Mode, num_ranks: int) -> MemoryForecast:
    """The memory of one rank.

    Args:
        step: What was counted of it.
        training: Whose step it is.
        mode: How the ranks train.
        num_ranks: How many there are.
    """
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
        # No engine loads packed weights in parts.
        loading=step.loaded + CONTEXT_BYTES if is_sharded and training.num_quantised else 0,
    )


def fits(wanted: MemoryForecast, device_bytes: int) -> bool:
    """True if `RESERVE` of the device stays free, also while the model is loaded.

    Args:
        wanted: What a rank needs.
        device_bytes: Memory of the smallest device.
    """
    return max(wanted.total, wanted.loading) <= usable_bytes(device_bytes)


def usable_bytes(device_bytes: int) -> int:
    """Without the reserve."""
    return int(device_bytes * (1 - RESERVE))


def decide(training: Training, forecasts: Sequence[MemoryForecast], num_ranks: int, device_bytes: int) -> Decision:
    """Chooses DDP where it fits, else sharding.

    Args:
        training: Of the script.
        forecasts: DDP's first; then, where that does not fit, sharded ones: on `num_ranks`, and on more ranks up to
            the first that fits.
        num_ranks: Ranks of the run.
        device_bytes: Memory of the smallest device.

    Raises:
        SetupError: Neither fits; says how many devices would do.
    """
    whole, *others = forecasts
    of = in_gib(device_bytes)
    if fits(whole, device_bytes):
        return Decision("ddp", f"DDP needs {in_gib(whole.total)} GiB of {of}: not sharded")
    if not training.trains_parts:
        raise SetupError(
            f"DDP needs {in_gib(whole.total)} GiB of {of}, and optim={training.optimizer!r} does not train "
            "sharded weights.",
            hint="Set optim='adamw_torch_fused', whose states each rank has a part of.",
        )
    needs, while_loading = f"DDP needs {in_gib(whole.total)} GiB of {of}", ""
    for parts in (row for row in others if (row.mode, row.num_ranks) == ("sharded", num_ranks)):
        needs += f", sharded over {num_ranks} ranks {in_gib(parts.total)}"
        if fits(parts, device_bytes):
            return Decision("sharded", f"{needs}: sharded")
        if parts.loading > parts.total:
            while_loading = f", and {in_gib(parts.loading)} while it is loaded"
    raise SetupError(
        f"{needs}{while_loading}; of {of} GiB {in_gib(usable_bytes(device_bytes))} can be planned for.",
        hint=f"{would_do(forecasts, device_bytes)} Fewer or shorter samples in a micro-batch, "
        "gradient_checkpointing=True, load_in_4bit=True or an 8-bit optimizer need less"
        f"{'' if training.offload else ', and shard_offload=True'}; shard='on' or 'off' trains without this check.",
    )


def would_do(forecasts: Sequence[MemoryForecast], device_bytes: int) -> str:
    """The first of them that fits, as a sentence."""
    found = next((row for row in forecasts if fits(row, device_bytes)), None)
    if found is None:
        return "No number of GPUs of this size would do that a step has samples for."
    if found.mode == "ddp":
        return f"{found.num_ranks} GPU{'s' if found.num_ranks > 1 else ''} of this size would do."
    return f"{found.num_ranks} GPUs of this size would do, sharded."


def calibrate(forecast_bytes: int, seen_bytes: int) -> str | None:
    """One sentence where the forecast was off by more than `TOLERANCE`; None where it was not.

    Args:
        forecast_bytes: `MemoryForecast.allocated` of this run.
        seen_bytes: The most that torch's allocator held at a time, since before the first step: of
            `torch.cuda.max_memory_allocated`.
    """
    off = seen_bytes / forecast_bytes - 1
    if abs(off) <= TOLERANCE:
        return None
    more = "more" if off > 0 else "less"
    return (
        f"memory: {in_gib(seen_bytes)} GiB were allocated, {abs(off):.0%} {more} than the {in_gib(forecast_bytes)} GiB "
        "of the forecast"
    )


def in_gib(num_bytes: int) -> str:
    """ "28" or, below ten, "7.4"."""
    size = num_bytes / GIB
    return f"{size:.0f}" if size >= 10 else f"{size:.1f}" if size >= 0.1 else f"{size:.3f}"


def decide_as_before(wanted: MemoryForecast, device_bytes: int, *, folder: str) -> Decision:
    """Chooses the mode in which a checkpoint was written: a training cannot resume from it the other mode.

    Args:
        wanted: What that mode needs on this run's ranks.
        device_bytes: Memory of the smallest device.
        folder: The checkpoint.

    Raises:
        SetupError: It does not fit in that mode.
    """
    is_sharded, num_ranks = wanted.mode == "sharded", wanted.num_ranks
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    name = f"sharded over {ranks}" if is_sharded else "DDP"
    needs = f"as {folder}, {name} needs {in_gib(wanted.total)} GiB of {in_gib(device_bytes)}"
    if fits(wanted, device_bytes) and not (is_sharded and num_ranks == 1):
        return Decision(wanted.mode, f"{needs}: {'' if is_sharded else 'not '}sharded")
    other = "off" if is_sharded else "on"
    raise SetupError(
        f"shard='auto' keeps the mode of the checkpoint that resume='auto' goes on from: {needs}, of which "
        f"{in_gib(usable_bytes(device_bytes))} can be planned for.",
        hint=f"Train on as many GPUs of such a size as before, or begin a new training: shard='{other}', resume='off' "
        "and the model loaded from that folder.",
    )
