"""How much memory each rank of a training needs, whole or sharded, and which of the two fits. Pure.

docs/memory.md has the formulas and what they leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.shard.activation import Activations, Weights, activations
from unsloth_multigpu.shard.description import ITEM_BYTES, Decoder, Description, Tensors, Training
from unsloth_multigpu.shard.moments import OUTER, largest_moment, part_bytes, part_of
from unsloth_multigpu.shard.optimizer import optimizer_of
from unsloth_multigpu.words import GIB

Way = Literal["ddp", "sharded"]
# Of a device's memory, which a forecast has to leave free: for fragments, and since it may be wrong by as much.
RESERVE = 0.15
# A forecast that is further off from what the allocator saw is worth a word.
TOLERANCE = 0.15
# What a device holds beside torch's allocator: the context with its kernels, and NCCL's buffers among several ranks.
CONTEXT_BYTES, NCCL_BYTES = GIB * 3 // 4, GIB // 2
_MOST_RANKS = 4096


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on the rank that needs most, at the peak of a step.

    Args:
        way: "ddp" = every rank has the whole model; "sharded" = FSDP2 divides it.
        num_ranks: Ranks of the run.
        weights: Parameters and buffers.
        gradients: Of the trainable parameters.
        optimizer: States that the optimizer keeps.
        activations: What comes on top of these at the peak: what autograd keeps, or what the update needs.
        overhead: Named: gathered layers, and what lies outside of torch's allocator.
        loading: While the model is loaded, before it is divided.
        host: Of this rank in the host's memory, where `shard_offload` moves it there.
    """

    way: Way
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
    def total(self) -> int:
        """What the device must have."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.overhead_bytes

    @property
    def allocated(self) -> int:
        """What torch's allocator should report as its peak."""
        return self.total - sum(num_bytes for name, num_bytes in self.overhead if name in _OUTSIDE)


_CONTEXT, _NCCL, _GATHERED, _UNDIVIDED = "context", "NCCL", "gathered layers", "whole gradients"
_OUTSIDE = (_CONTEXT, _NCCL)


@dataclass(frozen=True)
class Decision:
    """How a run is to train.

    Args:
        way: What was chosen.
        text: One line with the figures.
    """

    way: Way
    text: str


def forecast_memory(description: Description, way: Way, num_ranks: int) -> MemoryForecast:
    """The memory of one rank.

    Args:
        description: Model and training, see `probe`.
        way: How the ranks train.
        num_ranks: How many there are. The samples of a step are those of one process, unless the description says
            otherwise.

    Raises:
        SetupError: The optimizer or the model's activations are not known.
    """
    training = description.training.on_ranks(num_ranks)
    is_sharded = way == "sharded" and num_ranks > 1
    divide: Callable[[Tensors], Tensors] = (lambda t: part_of(t, training, num_ranks)) if is_sharded else (lambda t: t)
    moves = is_sharded and training.offload
    weights, whole_weights = _weights(description, training, num_ranks if is_sharded else 1)
    trained = [divide(t) for t in description.trained()]
    gradients = sum(t.count * t.numel * t.item_bytes for t in trained)
    optimizer = optimizer_of(training.optimizer, dict(training.optimizer_arguments))
    states = sum(t.count * optimizer.state_bytes(t.shape, t.item_bytes, embedding=t.embedding) for t in trained)
    decoder, base, autocast = _decoder(description), _base(description), training.autocast
    if is_sharded and autocast:
        # Whole layers are cast as they are gathered, so that no operation casts.
        decoder = replace(decoder, adapter_dtype=autocast)
        base = replace(base, item_bytes=min(base.item_bytes, ITEM_BYTES[autocast]))
    kept = activations(decoder, replace(training, autocast="") if is_sharded else training, base)
    update = optimizer.copies * gradients
    outside = [(_CONTEXT, CONTEXT_BYTES), *([(_NCCL, NCCL_BYTES)] if num_ranks > 1 else [])]
    named: list[tuple[str, int]] = []
    if is_sharded:
        parts = 0 if moves else gradients
        most = largest_moment(description, training, kept, num_ranks, 0 if moves else update)
        undivided = max(0, most.gradients - parts)
        named = [(_GATHERED, most.gathered), *([(_UNDIVIDED, undivided)] if undivided else [])]
        on_top = max(0, most.total - most.gathered - undivided - parts)
    else:
        # DDP's buckets hold gradients from the start; one process frees them before each forward.
        are_held = training.accumulation > 1 or num_ranks > 1
        on_top = _on_top(kept, gradients, 0 if are_held else _late_bytes(description), are_held=are_held)
        on_top = max(on_top, update)
    is_packed = any(t.packing for t in description.tensors)
    whole = sum(t.count * t.weight_bytes() for t in description.tensors)
    states += optimizer.table_bytes() if trained else 0
    return MemoryForecast(
        way=way,
        num_ranks=num_ranks,
        weights=whole_weights if moves else weights + whole_weights,
        gradients=0 if moves else gradients,
        optimizer=0 if moves else states,
        activations=on_top,
        overhead=tuple(named + outside),
        host=weights + gradients + states + update if moves else 0,
        # No engine loads packed weights in parts.
        loading=whole + CONTEXT_BYTES if is_sharded and is_packed else 0,
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


def fewest_ranks(description: Description, way: Way, device_bytes: int) -> int | None:
    """The smallest number of ranks that fits; None where no number does.

    Args:
        description: Model and training.
        way: How they train.
        device_bytes: Memory of the smallest device.
    """
    more = (64 * 2**power for power in range(1, (_MOST_RANKS // 64).bit_length()))
    if way == "sharded" and not description.training.trains_parts:
        return None
    candidates = (n for n in (*range(1, 65), *more) if has_samples(description, n))
    return next((n for n in candidates if fits(forecast_memory(description, way, n), device_bytes)), None)


def has_samples(description: Description, num_ranks: int) -> bool:
    """True if a step has a sample for each rank, without which the ranks refuse to train."""
    training = description.training
    return not training.keeps_batch or training.rows * training.accumulation >= num_ranks


def decide(description: Description, num_ranks: int, device_bytes: int) -> Decision:
    """Chooses DDP where it fits, else sharding.

    Args:
        description: Model and training.
        num_ranks: Ranks of the run.
        device_bytes: Memory of the smallest device.

    Raises:
        SetupError: Neither fits; says how many devices would do.
    """
    whole = forecast_memory(description, "ddp", num_ranks)
    of = in_gib(device_bytes)
    if fits(whole, device_bytes):
        return Decision("ddp", f"DDP needs {in_gib(whole.total)} GiB of {of}: not sharded")
    if not description.training.trains_parts:
        raise SetupError(
            f"DDP needs {in_gib(whole.total)} GiB of {of}, and optim={description.training.optimizer!r} does not train "
            "sharded weights.",
            hint="Set optim='adamw_torch_fused', whose states each rank has a part of.",
        )
    parts = forecast_memory(description, "sharded", num_ranks)
    needs = f"DDP needs {in_gib(whole.total)} GiB of {of}, sharded over {num_ranks} ranks {in_gib(parts.total)}"
    if num_ranks > 1 and fits(parts, device_bytes):
        return Decision("sharded", f"{needs}: sharded")
    while_loading = f", and {in_gib(parts.loading)} while it is loaded" if parts.loading > parts.total else ""
    num_more = fewest_ranks(description, "sharded", device_bytes)
    hint = would_do(num_more)
    raise SetupError(
        f"{needs}{while_loading}; of {of} GiB {in_gib(usable_bytes(device_bytes))} can be planned for.",
        hint=f"{hint} Fewer or shorter samples in a micro-batch, gradient_checkpointing=True, load_in_4bit=True or an "
        f"8-bit optimizer need less{'' if description.training.offload else ', and shard_offload=True'}; shard='on' or "
        "'off' trains without this check.",
    )


def would_do(num_ranks: int | None) -> str:
    """What `fewest_ranks` has found, as a sentence."""
    if num_ranks is None:
        return "No number of GPUs of this size would do that a step has samples for."
    return "1 GPU of this size would do." if num_ranks == 1 else f"{num_ranks} GPUs of this size would do, sharded."


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


def decide_as_before(
    description: Description, num_ranks: int, device_bytes: int, *, folder: str, is_sharded: bool
) -> Decision:
    """Chooses the way in which a checkpoint was written: a training cannot resume from it the other way.

    Args:
        description: Model and training.
        num_ranks: Ranks of the run.
        device_bytes: Memory of the smallest device.
        folder: The checkpoint.
        is_sharded: Its ranks each held a part of the weights.

    Raises:
        SetupError: It does not fit in that way.
    """
    way: Way = "sharded" if is_sharded else "ddp"
    wanted = forecast_memory(description, way, num_ranks)
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    name = f"sharded over {ranks}" if is_sharded else "DDP"
    needs = f"as {folder}, {name} needs {in_gib(wanted.total)} GiB of {in_gib(device_bytes)}"
    if fits(wanted, device_bytes) and not (is_sharded and num_ranks == 1):
        return Decision(way, f"{needs}: {'' if is_sharded else 'not '}sharded")
    other = "off" if is_sharded else "on"
    raise SetupError(
        f"shard='auto' keeps the way of the checkpoint that resume='auto' goes on from: {needs}, of which "
        f"{in_gib(usable_bytes(device_bytes))} can be planned for.",
        hint=f"Train on as many GPUs of such a size as before, or begin a new training: shard='{other}', resume='off' "
        "and the model loaded from that folder.",
    )


def _late_bytes(description: Description) -> int:
    """Gradients that are not there yet when the first layer, the last one to go backward, needs most.

    These are its own, but for that of its last matrix, and those of the embedding.
    """
    decoder = _decoder(description)
    layers = [t for t in description.trained() if t.unit not in OUTER]
    of_layer = sum(t.count * t.numel * t.item_bytes for t in layers) // decoder.num_layers
    last = max((t.numel * t.item_bytes for t in layers), default=0)
    of_embedding = sum(t.count * t.numel * t.item_bytes for t in description.trained() if t.unit == "embedding")
    return of_layer - last + of_embedding


def _on_top(kept: Activations, gradients: int, late: int, *, are_held: bool) -> int:
    """Most bytes above weights, gradients and optimizer states during forward and backward.

    A backward turns what was saved into gradients, layer by layer. Where gradients are not there before it, their place
    is free for activations until then.
    """
    if are_held:
        return kept.saved + max(kept.loss, kept.layer)
    return max(kept.saved + kept.loss - gradients, max(kept.saved, gradients - late) + kept.layer - gradients, 0)


def _weights(description: Description, training: Training, num_ranks: int) -> tuple[int, int]:
    """Bytes on the rank that has most: of what is divided among the ranks, and of what each of them has whole."""
    divided = whole = 0
    for tensors in description.tensors:
        # Int8Params have no floating dtype in which they could be divided.
        if num_ranks == 1 or not tensors.unit or tensors.packing == "8bit":
            whole += tensors.count * tensors.weight_bytes()
            continue
        numel = tensors.part_numel(num_ranks)
        if tensors.packing:
            divided += tensors.count * tensors.packed_bytes(numel)
            whole += tensors.count * tensors.constant_bytes()
        else:
            divided += tensors.count * numel * part_bytes(tensors, training)
    return divided, whole


def _decoder(description: Description) -> Decoder:
    if description.decoder is None:
        raise SetupError(
            f"The activations of {description.model} cannot be forecast: it has not the configuration of a decoder.",
            hint="Decide without a forecast: shard='on' or shard='off'.",
        )
    return description.decoder


def _base(description: Description) -> Weights:
    """What the activations depend on in the weights, without adapters."""
    layers = [t for t in description.parameters() if t.unit not in OUTER]
    matrices = [t for t in layers if len(t.shape) == 2 and not t.adapter]
    assert description.decoder is not None
    embeddings = [t for t in description.parameters() if t.embedding]
    stream = embeddings[0] if embeddings else matrices[0]
    heads = [t for t in description.parameters() if t.unit == "head" and len(t.shape) == 2]
    return Weights(
        item_bytes=stream.item_bytes,
        trainable=any(t.trainable for t in matrices),
        numel=sum(t.count * t.numel for t in matrices) // description.decoder.num_layers,
        head_numel=sum(t.numel for t in heads),
        packed=any(t.packing for t in matrices),
    )
