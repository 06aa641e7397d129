"""Digests of some rows of a data set: by them ranks, and a training that resumes, find that they have other data."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.utils.data import IterableDataset, Subset

from unsloth_multigpu.group.random_state import kept_random_state
from unsloth_multigpu.wire.digest import digest_hex, digest_of

# Of a data set in memory or in files of Arrow; of one of the script whose rows are numbers and texts; of one whose rows
# hold images or the like, which take their time to decode.
_MOST_ROWS, _MOST_OWN_ROWS, _FEW_ROWS = 1_000, 64, 32
# Numbers and bytes that are read at most, where a row is long.
_MOST_VALUES = 16_000_000
_NUM_PARTS = 8
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


def digests_of_rows(data: Any) -> list[str]:
    """Digests of rows that are spread evenly over a data set, which has rows.

    Up to 1,000 are read where that is cheap. The random generators are as before.

    Returns:
        Of each eighth of the rows "first-last: digest", with the rows' indices and 8 hexadecimal digits.
    """
    with kept_random_state():
        places = _spread(len(data), _FEW_ROWS)
        rows = _read(data, places)
        if len(more := _spread(len(data), _num_affordable(data, rows))) > len(places):
            places, rows = more, _read(data, more)
    bounds = [part * len(places) // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
    parts = [(first, last) for first, last in pairwise(bounds) if first < last]
    return [f"{places[a]}-{places[b - 1]}: {digest_of([*map(_compact, rows[a:b])])[:8]}" for a, b in parts]


def plain_values(value: Any) -> Any:
    """The texts and numbers in a row. The text of other objects may differ between ranks, for example by an address.

    Of a tensor or an array with 10,000 values or more, such as an image, only the shape.
    """
    if isinstance(value, Mapping):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(v) for v in value]
    if _is_array(value):
        return value.tolist() if math.prod(value.shape) < _LARGE_ARRAY else list(value.shape)
    return value if _is_plain(value) else type(value).__name__


def _spread(num: int, most: int) -> list[int]:
    """Up to `most` of `num` indices, the first and the last among them."""
    most = min(num, most)
    return [i * (num - 1) // max(most - 1, 1) for i in range(most)]


def _read(data: Any, places: Sequence[int]) -> list[Any]:
    """Rows; of a Hugging Face data set as they are stored, before its transforms draw random numbers."""
    if type(data) is Subset:
        return _read(data.dataset, [int(data.indices[i]) for i in places])
    if hasattr(data, "with_format"):
        return _rows_of_table(data.with_format("arrow")[[*places]]) if places else []
    return [data[i] for i in places]


def _rows_of_table(table: Any) -> list[Any]:
    """The rows of a table of Arrow, in which a list of numbers is the bytes of it."""
    columns = [_column(column) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _column(column: Any) -> list[Any]:
    """A value per row."""
    import pyarrow

    kind = column.type
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    # Other types, and rows that have no list, take ten times as long.
    if not is_list or not pyarrow.types.is_primitive(kind.value_type) or column.null_count:
        return list(column.to_pylist())
    lists = column.combine_chunks()
    values = lists.flatten()
    if values.null_count:
        return list(column.to_pylist())
    flat, end, parts = values.to_numpy(zero_copy_only=False), 0, []
    for length in lists.value_lengths().to_pylist():
        parts.append(flat[end : end + length].tobytes())
        end += length
    return parts


def _num_affordable(data: Any, rows: Sequence[Any]) -> int:
    """How many rows may be read.

    Args:
        data: The data set.
        rows: Some of its rows. Ranks with the same rows find the same number.
    """
    while type(data) is Subset:
        data = data.dataset
    if hasattr(data, "with_format") or isinstance(data, (list, tuple)):
        most = _MOST_ROWS
    else:
        most = _MOST_OWN_ROWS if all(map(_is_light, rows)) else _FEW_ROWS
    num_values = sum(map(_num_values, rows))
    return max(min(most, _MOST_VALUES * len(rows) // max(num_values, 1)), _FEW_ROWS)


def _is_array(value: Any) -> bool:
    return hasattr(value, "tolist") and hasattr(value, "shape")


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, bytes, int, float, type(None)))


def _begins_with_number(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], (int, float))


def _is_light(value: Any) -> bool:
    """False for a row with what may have been decoded: a large array, or an object such as an image."""
    if isinstance(value, (Mapping, list, tuple)):
        return all(map(_is_light, value.values() if isinstance(value, Mapping) else value))
    return math.prod(value.shape) < _LARGE_ARRAY if _is_array(value) else _is_plain(value)


def _num_values(value: Any) -> int:
    if _begins_with_number(value):
        return len(value)
    if isinstance(value, (Mapping, list, tuple)):
        return sum(map(_num_values, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, (str, bytes)):
        return len(value)
    return math.prod(value.shape) if _is_array(value) and math.prod(value.shape) < _LARGE_ARRAY else 1


def _compact(value: Any) -> Any:
    """What `plain_values` finds, with lists of numbers and bytes as digests: their text would take long."""
    if isinstance(value, Mapping):
        return {str(k): _compact(v) for k, v in value.items()}
    if _is_array(value):
        value = plain_values(value)
    if _begins_with_number(value):
        for kind in ("q", "d"):
            try:
                return kind + digest_hex(array(kind, value).tobytes())
            except (TypeError, ValueError, OverflowError):  # Not all are such numbers.
                continue
    if isinstance(value, (list, tuple)):
        return [_compact(v) for v in value]
    return digest_hex(value) if isinstance(value, bytes) else plain_values(value)
