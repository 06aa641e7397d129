"""Bytes of living tensors on the CPU, at every operation: what `torch.cuda.max_memory_allocated` is on a card."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Counts each storage once, from the operation that makes it until it is freed, with the size that it has then.

    Args:
        before: Tensors that were there before, and are not counted.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._before: set[int] = set()
        self.leave_out(before)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Does not count these any more, and begins anew."""
        self._before |= {local(tensor).untyped_storage()._cdata for tensor in tensors}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = local(tensor).untyped_storage()
                if storage._cdata not in self._alive:
                    self._alive[storage._cdata] = weakref.ref(storage)
                    weakref.finalize(storage, self._alive.pop, storage._cdata)
        # FSDP2 keeps storages and gives their memory back.
        sizes = {key: storage.nbytes() for key, ref in [*self._alive.items()] if (storage := ref()) is not None}
        self.peak = max(self.peak, sum(size for key, size in sizes.items() if key not in self._before))
        return result


def local(tensor: Any) -> torch.Tensor:
    """Of a sharded tensor this rank's part, else the tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
