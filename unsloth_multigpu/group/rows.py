"""A digest of some rows of a data set: by it ranks, and a training that resumes, find that they have other data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset, Subset

from unsloth_multigpu.group.random_state import kept_random_state
from unsloth_multigpu.wire.digest import digest_of

_MOST_ROWS = 64
# An array that is not smaller counts by its shape.
_LARGE_ARRAY = 10_000


def num_rows(data: Any) -> int | None:
    """How many rows a data set has; None for a stream, and where rows cannot be read by their index."""
    # An IterableDataset of torch has a __getitem__, which raises.
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None
    try:
        return len(data)
    except TypeError:
        return None


def digest_of_rows(data: Any) -> str:
    """The digest of up to 64 rows that are spread evenly over a data set, the first and the last among them.

    The random generators are as before.
    """
    num = len(data)
    most = min(num, _MOST_ROWS)
    with kept_random_state():
        rows = _read(data, [i * (num - 1) // max(most - 1, 1) for i in range(most)])
    return digest_of(plain_values(rows))


def plain_values(value: Any) -> Any:
    """The texts and numbers in a row. The text of other objects may differ between ranks, for example by an address.

    Of a tensor or an array with 10,000 values or more, such as an image, only the shape.
    """
    if isinstance(value, Mapping):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(v) for v in value]
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist() if math.prod(value.shape) < _LARGE_ARRAY else list(value.shape)
    return value if isinstance(value, (str, bytes, int, float, type(None))) else type(value).__name__


def _read(data: Any, places: Sequence[int]) -> list[Any]:
    """Rows; of a Hugging Face data set as they are stored, before its transforms draw random numbers."""
    if type(data) is Subset:
        return _read(data.dataset, [int(data.indices[i]) for i in places])
    if hasattr(data, "with_format"):
        return list(data.with_format("arrow")[[*places]].to_pylist()) if places else []
    return [data[i] for i in places]
