"""Checks that all ranks hold the same trainable weights, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unsloth_multigpu.errors import DivergenceError
from unsloth_multigpu.group.manager import DDPManager, first_difference
from unsloth_multigpu.group.shards import is_sharded
from unsloth_multigpu.wire.digest import digest_of
from unsloth_multigpu.words import listed

# A digest of the rows read from a stream, see `StepStream.digest`.
STREAM = "rows of the stream"
_STREAM_HINT = (
    "Each rank reads the whole stream and keeps its share of each step. Do not divide it by RANK, WORLD_SIZE or "
    "split_dataset_by_node, and seed your own shuffles and generators. verify_every=1 finds the step."
)
_HINT = (
    "Look for a forward pass that bypasses DDP, such as model.module.lm_head(...) or self.model(...) in compute_loss: "
    "call the given model, and let its forward pass compute the rest, or set strategy='allreduce', which works without "
    "DDP. Or look for code that changes weights or gradients on one rank only: a callback or hook, weights set after "
    "wrapping, parameters that only the optimizer has, DDP(init_sync=False), an optimizer that draws random "
    "numbers, faulty memory. verify_every=1 finds the step. GPUs of different kinds may round differently: use "
    "verify_every=0 for them."
)
_INTEGER_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements of one chunk. The CPU's cache holds a small one; an accelerator wants few launches.
_CPU_CHUNK, _ACCELERATOR_CHUNK = 2**16, 2**21


class ReplicaProof:
    """Compares the trainable weights and the step of all ranks by 64-bit hashes.

    The Trainer calls `on_step_end` before it saves the checkpoint of a step, so a checked step with different weights
    is not saved. `extra` returns further facts that must be equal: name -> text.
    """

    def __init__(self, manager: DDPManager, extra: Callable[[], Mapping[str, str]] = dict) -> None:
        self._manager = manager
        self._extra = extra
        self._first_step: int | None = None
        self._last_equal_step: int | None = None

    def is_due(self, step: int) -> bool:
        """True after steps 1, 2, 4, 8 and so on of this training, and after every `verify_every` steps.

        Most causes of a difference, such as a callback that draws random numbers, are present from the first step. A
        few comparisons at growing intervals find them early.
        """
        every = self._manager.config.verify_every
        if every == 0 or self._manager.identity.world_size == 1:
            return False
        if self._first_step is None:
            self._first_step = step
        num_done = step - self._first_step + 1
        return step % every == 0 or (num_done < every and num_done.bit_count() == 1)

    def is_unchecked(self, step: int, *, is_reloaded: bool = False) -> bool:
        """True if the final weights were not compared: the last step was not due, or weights were loaded after it."""
        return self._last_equal_step is not None and (is_reloaded or self._last_equal_step != step)

    def check(
        self,
        model: nn.Module,
        step: int,
        others: Sequence[tuple[str, torch.Tensor]] = (),
        trained: Set[int] | None = None,
    ) -> None:
        """Compares this rank with the others after `step`. Collective: one short message if all are equal.

        Args:
            model: The model without DDP's wrapper.
            others: Names and tensors that are trained but not part of the model.
            trained: Ids of the parameters that were trained in this step, see `replicated_tensors`.

        Raises:
            DivergenceError: The ranks differ. Raised on every rank, with names of ranks and tensors.
        """
        named = [*replicated_tensors(model, trained), *others]
        hashes = tensor_hashes([p for _, p in named])
        parts = [(n, p) for n, p in _trained(model, trained) if is_sharded(p)]
        every = str([(n, tuple(p.shape), p.dtype) for n, p in (*named, *parts)])
        facts = {"step": step, "trainable tensors": digest_of(every), **self._extra()}
        ranks = self._manager.gather_json([facts, digest_of(hashes)])
        if differences := first_difference([theirs for theirs, _ in ranks]):
            hint = _STREAM_HINT if list(differences) == [STREAM] else _HINT
            self._raise(step, "; ".join(differences.values()), hint)
        if len({digest for _, digest in ranks}) > 1:
            rows = self._manager.gather_json(hashes)
            self._raise(step, describe_divergence([n for n, _ in named], rows))
        self._last_equal_step = step

    def _raise(self, step: int, what: str, hint: str = _HINT) -> None:
        last = self._last_equal_step
        since = f"All ranks were equal after step {last}." if last is not None else "It is the first check."
        raise DivergenceError(f"The ranks' replicas differ after step {step}: {what}. {since}", hint=hint)


def replicated_tensors(model: nn.Module, trained: Set[int] | None = None) -> list[tuple[str, torch.Tensor]]:
    """Returns names and trained tensors that must be equal on all ranks, in the order of the model's parameters.

    `trained` are ids of parameters; None = those that are trainable now. A callback may have changed which these are:
    a layer that is unfrozen between two steps gets rank 0's values when the next step starts.

    Sharded tensors, and those that DDP ignores, are left out. For subclasses that wrap tensors (torchao), the inner
    tensors are returned.
    """
    # DDP also accepts a name of the outermost module with a leading dot.
    ignored = {name.removeprefix(".") for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    named = [(n, p) for n, p in _trained(model, trained) if n not in ignored and not is_sharded(p)]
    return [plain for name, parameter in named for plain in _plain_tensors(name, parameter)]


def _trained(model: nn.Module, ids: Set[int] | None) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if (p.requires_grad if ids is None else id(p) in ids)]


def _plain_tensors(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if not is_traceable_wrapper_subclass(tensor):
        return [(name, tensor)]
    parts, _ = tensor.__tensor_flatten__()
    return [plain for part in parts for plain in _plain_tensors(f"{name}.{part}", getattr(tensor, part))]


def tensor_hashes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns a signed 64-bit hash of each tensor's bits, computed on its device.

    The bits of each element are read as an integer, multiplied by an odd 64-bit weight of its position, and summed
    modulo 2^64. An odd weight has an inverse modulo 2^64, so a change of a single element always changes the hash.
    Changes of several elements cancel with a probability of about 2^-32 at most. Takes any floating dtype, and about 48
    MiB of temporary memory on an accelerator, 2 MiB on the CPU, more for tensors that are not contiguous.
    """
    with torch.no_grad():
        chunks = {d: _CPU_CHUNK if d.type == "cpu" else _ACCELERATOR_CHUNK for d in {t.device for t in tensors}}
        weights = {device: _odd_weights(size, device, seed=0) for device, size in chunks.items()}
        hashes = [_hash(tensor, weights[tensor.device]) for tensor in tensors]
        # One copy from each device, not one for each tensor.
        numbers = {d: iter(torch.stack([h for h in hashes if h.device == d]).tolist()) for d in weights}
    return [next(numbers[found.device]) for found in hashes]


def _hash(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    bits = tensor.view(_INTEGER_OF_BYTES[tensor.element_size()])
    pieces: Iterable[torch.Tensor] = bits.reshape(-1).split(len(weights))
    if bits.dtype == torch.int64:
        # Two flipped top bits would cancel: 2^63 times any odd number is the same.
        pieces = (piece ^ (piece >> 32) for piece in pieces)
    sums = torch.stack([(weights[: len(piece)] * piece).sum() for piece in pieces])
    return (sums * _odd_weights(len(sums), tensor.device, seed=1)).sum()


def _odd_weights(num_weights: int, device: torch.device, *, seed: int) -> torch.Tensor:
    """Returns pseudo-random odd int64 numbers, equal on every device. Source: the finalizer of splitmix64."""
    x = (torch.arange(1, num_weights + 1, device=device) + (seed << 40)) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return (x ^ (x >> 31)) | 1


def describe_divergence(names: Sequence[str], hashes: Sequence[Sequence[int]]) -> str:
    """Describes which ranks differ from the most common hash, in which tensors. Takes `hashes[rank][tensor]`."""
    tensors_of: dict[tuple[int, int], list[str]] = {}
    for name, column in zip(names, zip(*hashes, strict=True), strict=True):
        usual = Counter(column).most_common(1)[0][0]
        for rank in (rank for rank, value in enumerate(column) if value != usual):
            tensors_of.setdefault((rank, column.index(usual)), []).append(name)
    parts = [
        f"rank {rank} differs from rank {other} in {len(tensors)} of {len(names)} trainable tensors: {listed(tensors)}"
        for (rank, other), tensors in tensors_of.items()
    ]
    return listed(parts, separator="; ")


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and buffers that a checkpoint contains. Other buffers, such as position tables, are recomputed."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer
