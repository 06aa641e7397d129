"""How a collator lays rows into a micro-batch, found by letting it collate two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.step.cost import CostModel

# What tells a model where rows begin that lie end to end.
_ROW_BOUNDS = ("position_ids", "seq_idx", "cu_seq_lens_q", "packed_seq_lengths")


def as_collated(lengths: list[int], loader: Any, cost: CostModel) -> tuple[list[int], CostModel]:
    """Compares the lengths with what the collator makes of the shortest and the longest row, and learns how it pads.

    Raises:
        SetupError: It makes more of them than their lengths say, so that a plan would not hold the limit of memory.
    """
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    # Two rows each: some collators cannot do with one.
    alike, both = (_collated(loader, [shortest, other]) for other in (shortest, longest))
    padded = dataclasses.replace(cost, pad_multiple=_pad_multiple(loader.collate_fn))
    if both.ids.shape[0] == 1:
        total = lengths[shortest] + lengths[longest]
        if both.ids.numel() > padded.padded(total) or not both.keeps_rows_apart(lengths[shortest]):
            raise SetupError("the collator joins rows without telling them apart", hint="Set balance='off'.")
        return lengths, dataclasses.replace(cost, is_padded=False)
    least, widest = alike.ids.shape[-1], both.ids.shape[-1]
    # A collator may cut what is too long.
    cut = [min(length, widest) for length in lengths]
    if least > padded.padded(cut[shortest]) or widest > padded.padded(cut[longest]):
        raise SetupError(
            f"the collator makes {least} tokens of a row of {lengths[shortest]} and {widest} of one of "
            f"{lengths[longest]}",
            hint="Let it pad to the longest row of the batch.",
        )
    return cut, padded


@dataclasses.dataclass(frozen=True)
class _Collated:
    """Two rows as the collator makes them: `ids` is 2 x longest, or 1 x all where it lays them end to end."""

    ids: torch.Tensor
    batch: Mapping[str, Any]

    def keeps_rows_apart(self, length: int) -> bool:
        """True if attention and labels end with the first row, which has `length` tokens."""
        labels = self.batch.get("labels")
        is_masked = not isinstance(labels, torch.Tensor) or not length or int(labels[0, length]) == -100
        return is_masked and any(name in self.batch for name in _ROW_BOUNDS)


def _collated(loader: Any, rows: Sequence[int]) -> _Collated:
    batch = loader.collate_fn([loader.dataset[i] for i in rows])
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise SetupError("the collator makes no input_ids", hint="Set balance='off'.")
    more = [n for n, v in batch.items() if isinstance(v, torch.Tensor) and v.numel() > ids.numel()]
    if more:
        # Their size is not counted, so that the limit of memory would not hold.
        raise SetupError(f"rows are more than their tokens: {', '.join(more)}", hint="Set balance='off'.")
    return _Collated(ids, batch)


def _pad_multiple(collate: Any) -> int:
    # The Trainer wraps a collator that takes columns away.
    inner = getattr(collate, "data_collator", collate)
    return int(getattr(inner, "pad_to_multiple_of", None) or 1)


def free_rows(inputs: Sequence[Any]) -> None:
    """Undoes a Trainer's mark that the number of rows is constant.

    Unsloth marks it for the compiler when it counts a step's tokens; what is compiled and takes a mask or tokens would
    be compiled again for each number of rows. A weak mark goes before a static one.

    Args:
        inputs: What a model is called with, each a mapping of tensors.
    """
    for batch in inputs:
        for value in batch.values() if isinstance(batch, Mapping) else ():
            if 0 in getattr(value, "_dynamo_static_indices", ()):
                torch._dynamo.maybe_mark_dynamic(value, 0)
