"""Runs torch code on fake tensors, which have shapes but no values, and counts the bytes that it would allocate."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ATEN = torch.ops.aten
# dtypes of lengths, indices and masks, which keep their values. 8-bit integers are weights or communication buffers.
_INTEGERS = (torch.bool, torch.int16, torch.int32, torch.int64)
# Operators that choose indices by values, which fake tensors do not have.
_CHOICES = (_ATEN.topk, _ATEN.sort, _ATEN.argmax, _ATEN.argmin, _ATEN.argsort, _ATEN.multinomial, _ATEN.max, _ATEN.min)
# Operators that accept a mask as an index. Its values determine the shape of the result.
_MASKED = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)


class ByteCounter(TorchDispatchMode):
    """Counts each storage of a device once, from the operation that allocates it until it is freed.

    What is computed from the batch alone, such as lengths and masks, keeps its values, so code that reads it takes the
    same branches as in training. Indices that depend on missing values, such as a token's experts, are spread evenly.

    Args:
        device: The device. Storages that exist already are not counted.

    Attributes:
        now: Number of bytes that are allocated now.
        peak: Maximum of `now` since `reset_peak`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._device = device
        self._sizes: dict[int, int] = {}
        self._older: set[int] = set()
        # FSDP2 resizes the storages of gathered weights to 0 bytes and back, by no operation that is seen here.
        self._resized: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Sets `peak` to `now`."""
        self.peak = self.now

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._leave_out(tensor.untyped_storage())
        result = _run(function, args, kwargs or {})
        if function.namespace == "fsdp":
            self._look_at_resized((args, kwargs))
        for tensor in _tensors(result):
            # `tensor.device`, because the storage of a fake tensor is on the meta device.
            if tensor.device.type == self._device.type:
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _look_at_resized(self, given: Any) -> None:
        """Updates storages that FSDP2 has resized. Called at its operations, one per parameter group."""
        for tensor in _tensors(given):
            storage = tensor.untyped_storage()
            self._resized[storage._cdata] = weakref.ref(storage)
        for key, reference in [*self._resized.items()]:
            if (kept := reference()) is not None:
                self._set(key, kept.nbytes())

    def _leave_out(self, storage: torch.UntypedStorage) -> None:
        """Excludes a storage that no counted operation has allocated."""
        key = storage._cdata
        if key not in self._sizes and key not in self._older:
            self._older.add(key)
            weakref.finalize(storage, self._older.discard, key)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes and key not in self._older:
            self._sizes[key] = 0
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._remove, key)

    def _set(self, key: int, num_bytes: int) -> None:
        if key in self._sizes:
            self.now += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        self._resized.pop(key, None)


@contextmanager
def fake_memory(device: torch.device) -> Iterator[ByteCounter]:
    """Makes new tensors fake within the context, and counts their bytes."""
    with FakeTensorMode(allow_non_fake_inputs=True), ByteCounter(device) as counter:
        yield counter


def has_no_values(*arguments: Any) -> bool:
    """True if one of the arguments is or contains a fake tensor."""
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(arguments))


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    given = _tensors((args, kwargs))
    fakes = [tensor for tensor in given if isinstance(tensor, FakeTensor)]
    if not fakes and (given or _makes_integers(function, kwargs)):
        with unset_fake_temporarily():
            return function(*args, **kwargs)
    if function is _ATEN._local_scalar_dense.default:
        # `tensor.item()`: taken to be for a log, so that any number will do.
        return False if fakes[0].dtype is torch.bool else 1.0 if fakes[0].dtype.is_floating_point else 1
    if function.overloadpacket is _ATEN.masked_select:
        function, args = _ATEN.index.Tensor, (args[0], [args[1]])
    if function.overloadpacket in _MASKED:
        args = (args[0], _without_masks(args[1]), *args[2:])
    result = function(*args, **kwargs)
    if function.overloadpacket not in _CHOICES or not fakes:
        return result
    num_choices = _num_choices(function, args, kwargs)
    return tree_map(lambda value: _spread(value, num_choices), result)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Returns all tensors in `values`; for a DTensor its local shard."""
    return [getattr(leaf, "_local_tensor", leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _makes_integers(function: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    return dtype in _INTEGERS or (dtype is None and function.overloadpacket is _ATEN.arange)


def _without_masks(indices: Any) -> list[Any]:
    """Replaces masks by the positions where they are true."""
    positions: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor)
        with unset_fake_temporarily():
            positions.extend(index.nonzero(as_tuple=True) if is_mask else [index])
    return positions


def _num_choices(function: Any, args: Any, kwargs: Any) -> int:
    """Returns the size of the dimension from which an operator chooses indices."""
    values = args[0]
    position = 2 if function.overloadpacket is _ATEN.topk else 1
    dim = kwargs.get("dim", args[position] if len(args) > position else None)
    is_whole = function.overloadpacket is _ATEN.multinomial or not isinstance(dim, int) or isinstance(dim, bool)
    return int(values.size(-1 if is_whole else dim)) if values.dim() else 1


def _spread(value: Any, num_choices: int) -> Any:
    """Replaces fake indices by real ones, in which each of `num_choices` values occurs equally often."""
    if not isinstance(value, FakeTensor) or value.dtype is not torch.int64:
        return value
    with unset_fake_temporarily():
        return torch.arange(value.numel(), device=value.device).remainder_(num_choices).view(value.shape)
