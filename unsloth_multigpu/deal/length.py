"""How many tokens each sample of a data set has, read without tokenizing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Subset

from unsloth_multigpu.errors import SetupError

_ROWS_AT_ONCE = 10_000
# Columns of TRL's preference trainers, in new and older releases. Both answers follow the prompt, and are padded to the
# same length.
_PREFERENCES = (
    ("prompt_ids", "chosen_ids", "rejected_ids"),
    ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"),
)


def read_lengths(dataset: Any, length_column: str, *, may_read_rows: bool) -> list[int]:
    """Returns the number of tokens of each sample of a data set with random access.

    For a Hugging Face data set, the offsets of a column are read, or a column of lengths. For a list, rows are read.
    Other data sets may have an attribute `lengths`. With `may_read_rows`, all rows of other data sets are read, which
    may tokenize them.

    Raises:
        SetupError: The lengths are not known.
    """
    if isinstance(dataset, Subset):
        whole = read_lengths(dataset.dataset, length_column, may_read_rows=may_read_rows)
        return [whole[i] for i in dataset.indices]
    if hasattr(dataset, "select_columns") and hasattr(dataset, "column_names"):
        return _stored_lengths(dataset, length_column)
    if hasattr(getattr(dataset, "lengths", None), "__len__"):
        lengths = [int(length) for length in dataset.lengths]
        if len(lengths) != len(dataset):
            raise SetupError(
                f"{type(dataset).__name__}.lengths has {len(lengths)} entries for {len(dataset)} rows.",
                hint="Give it one number of tokens for each row.",
            )
        return lengths
    if isinstance(dataset, list | tuple) or may_read_rows:
        return [_row_length(dataset[i]) for i in range(len(dataset))]
    raise SetupError(
        f"{type(dataset).__name__} has no attribute `lengths` with the tokens of each row",
        hint="Give it one: a list of numbers, in the order of the rows.",
    )


def _stored_lengths(dataset: Any, length_column: str) -> list[int]:
    names = dataset.column_names
    if dataset.format["type"] == "custom":
        raise SetupError(
            "rows get their tokens when they are read", hint="Tokenize with Dataset.map instead of set_transform."
        )
    if "input_ids" in names:
        return _list_lengths(dataset, "input_ids")
    if columns := next((columns for columns in _PREFERENCES if {*columns} <= {*names}), None):
        prompt, chosen, rejected = (_list_lengths(dataset, name) for name in columns)
        return [p + max(c, r) for p, c, r in zip(prompt, chosen, rejected, strict=True)]
    if length_column in names:
        return [int(length) for length in dataset.with_format(None)[length_column]]
    raise SetupError(
        f"rows have no input_ids and no column {length_column!r}",
        hint=f"Tokenize the data set before it is given to the Trainer, or add a column {length_column!r}.",
    )


def _list_lengths(dataset: Any, name: str) -> list[int]:
    """Reads the offsets of a column of lists; its values stay on the disk."""
    import pyarrow.compute

    lengths: list[int] = []
    try:
        for table in dataset.select_columns([name]).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            lengths.extend(pyarrow.compute.list_value_length(table.column(0)).to_pylist())
    except pyarrow.ArrowNotImplementedError:
        kind = dataset.features[name]
        raise SetupError(f"{name} is not a column of lists but {kind}", hint="Set balance='off'.") from None
    missing = next((i for i, length in enumerate(lengths) if length is None), None)
    if missing is not None:
        raise SetupError(f"row {missing} has no {name}", hint="Leave rows without tokens out.")
    return lengths


def _row_length(row: Any) -> int:
    tokens = row.get("input_ids") if isinstance(row, Mapping) else None
    if tokens is None or isinstance(tokens, str):
        raise SetupError("rows have no input_ids", hint="Set balance='off'.")
    return len(tokens)
