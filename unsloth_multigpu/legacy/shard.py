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


def shard_factors(weights: Sequence[float], aggregation: str, reduction: LossReduction) -> list[float]:
    """What the losses of a micro-batch's shards are multiplied by before their gradients are added up.

    Args:
        weights: Labelled tokens of each shard, or rows, all above 0.
        aggregation: Of the gradients g of the shards' mean losses, where T is the sum of the weights w: "weighted" is
            the sum of w/T g, which is the micro-batch's own; "mean" the plain mean; "sum" the plain sum.
        reduction: Of the loss.
    """
    total, num_shards = sum(weights), len(weights)
    of_means = {
        "weighted": [w / total for w in weights],
        "mean": [1 / num_shards] * num_shards,
        "sum": [1.0] * num_shards,
    }
    if not reduction.is_token_normalised:
        return of_means[aggregation]
    # A shard's loss is its mean times its own part of the step's tokens already.
    return [factor * total / w for factor, w in zip(of_means[aggregation], weights, strict=True)]
