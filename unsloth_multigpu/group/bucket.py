"""Buckets: many tensors in few messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch


def buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yields buckets: tensors of one dtype and device, with at most `bucket_bytes` together, or one larger tensor.

    Tensors keep their order, which is the same on all ranks. A tensor of another dtype or device does not end a bucket:
    batch norms have an integer after two floats. Empty tensors are left out. With 0 bytes, each tensor has its own
    bucket.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    filled_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in filter(torch.Tensor.numel, tensors):
        kind = (tensor.dtype, tensor.device)
        if kind in groups and filled_bytes[kind] + num_bytes(tensor) > bucket_bytes:
            yield groups.pop(kind)
            filled_bytes[kind] = 0
        groups.setdefault(kind, []).append(tensor)
        filled_bytes[kind] += num_bytes(tensor)
    yield from groups.values()


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns one tensor with the elements of all, in order. Always a copy."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def unflatten_into(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Writes the elements of `flat` back into the tensors that it was made from."""
    with torch.no_grad():
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def num_bytes(*tensors: torch.Tensor) -> int:
    """Returns the bytes of the elements of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def all_reduce_bytes(payload_bytes: int, world_size: int) -> int:
    """Returns the bytes that each rank sends in a ring all-reduce: 2 (n - 1) / n of the payload.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return 2 * (world_size - 1) * payload_bytes // world_size
