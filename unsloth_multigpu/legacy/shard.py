"""Cuts a micro-batch into shards of rows, for the legacy serial path.

Imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.legacy.replica import HINT
from unsloth_multigpu.step.loss import LossReduction


def count_rows(inputs: Any) -> int:
    """Rows of a micro-batch.

    Raises:
        SetupError: It holds something that cannot be cut, or whose first dimension is another one.
    """
    if not isinstance(inputs, Mapping):
        raise SetupError(f"A batch of type {type(inputs).__name__} cannot be cut into rows.", hint=HINT)
    lengths = {name: _length(value) for name, value in inputs.items()}
    rows = {length for length in lengths.values() if length is not None}
    if len(rows) != 1 or not min(rows) > 0:
        shown = ", ".join(f"{name}={length}" for name, length in lengths.items() if length is not None)
        raise SetupError(f"A batch cannot be cut where rows are not the first dimension of all: {shown}.", hint=HINT)
    return rows.pop()


def _length(value: Any) -> int | None:
    """None for what all shards share."""
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    if isinstance(value, (list, tuple)):
        return len(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    raise SetupError(f"A batch that holds a {type(value).__name__} cannot be cut into rows.", hint=HINT)


def cut_rows(inputs: Mapping[str, Any], num_shards: int) -> list[dict[str, Any]]:
    """Cuts a micro-batch into neighbouring rows, whose numbers differ by at most one."""
    rows = count_rows(inputs)
    ends = [rows * (i + 1) // num_shards for i in range(num_shards)]
    parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    return [{name: v if _length(v) is None else v[part] for name, v in inputs.items()} for part in parts]


def shard_factors(weights: Sequence[float], reduction: LossReduction) -> list[float]:
    """What the losses of a micro-batch's shards are multiplied by, so that losses and gradients add up to its own.

    Args:
        weights: Labelled tokens of each shard, or rows, all above 0.
        reduction: Of the loss.
    """
    # Of a sum over tokens, a shard's loss is divided by those of the whole step already.
    return [1.0 if reduction.is_token_normalised else weight / sum(weights) for weight in weights]
