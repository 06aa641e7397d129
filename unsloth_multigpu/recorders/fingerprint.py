"""What recorders compare: hashes of the samples of a micro-batch, independent of padding and order, and the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.wire.digest import digest_hex


def fingerprints(inputs: Any) -> Counter[str]:
    """Counts the samples of a micro-batch, the inputs of `Trainer.training_step`, by their hash.

    Usually they are a mapping with `input_ids` of shape (rows, length); without those, the first tensor is hashed.
    Without `attention_mask`, a row is split where its `position_ids` begin again (padding-free and packed batches).
    Other `*input_ids` are hashed only without `input_ids`: the text that KTO adds to a row need not belong to it.
    """
    if not isinstance(inputs, Mapping):  # Trainers that generate completions get rows of the data set.
        return Counter(_hash([repr(row).encode()]) for row in inputs)
    tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
    tokens = {n: v for n, v in tensors.items() if n.endswith("input_ids") and v.dim() == 2}
    if "input_ids" in tokens and "attention_mask" not in tensors and "position_ids" in tensors:
        return Counter(_hash([_bytes(part)]) for part in _parts(tokens["input_ids"], tensors["position_ids"]))
    if "input_ids" in tokens:
        tokens = {"input_ids": tokens["input_ids"]}
    if not tokens:
        return Counter(_hash([_bytes(row)]) for row in next(iter(tensors.values()), ()))
    # Preference data has several texts per row, each with its own mask.
    masks = {name: tensors.get(name.removesuffix("input_ids") + "attention_mask") for name in tokens}
    texts = [_unpadded(rows, masks[name]) for name, rows in tokens.items()]
    return Counter(_hash(row) for row in zip(*texts, strict=True))


def trained_weights(model: nn.Module, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and values of the trainable weights on rank 0. Collective if they are sharded."""
    from unsloth_multigpu.group.shards import has_shards, reshard, whole_of

    reshard(model)
    if rank == 0 or has_shards(model):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                whole = whole_of(parameter.detach())
                if rank == 0:
                    yield name, whole


def _unpadded(rows: torch.Tensor, mask: torch.Tensor | None) -> list[bytes]:
    # A mask with more dimensions is an attention pattern, not padding.
    has_mask = mask is not None and mask.shape == rows.shape
    return [_bytes(row[mask[i].bool()] if has_mask and mask is not None else row) for i, row in enumerate(rows)]


def _parts(tokens: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    parts = []
    for row, places in zip(tokens, positions, strict=True):
        starts = [start for start in (places == 0).nonzero().flatten().tolist() if start > 0]
        # The part before the first 0 is the rest of a truncated sample, and is hashed, too.
        parts += row.tensor_split(starts)
    return parts


def _bytes(values: torch.Tensor) -> bytes:
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash(texts: Sequence[bytes]) -> str:
    return digest_hex(b"\0".join(texts))
