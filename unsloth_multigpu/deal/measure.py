"""Measures what the planner needs to know of the samples, the model, the collator and the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from unsloth_multigpu.deal.plan import CostModel
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import text_config
from unsloth_multigpu.group.waits import Lap, moment

_ROWS_AT_ONCE = 10_000
# Columns of TRL's preference trainers, in new and older releases. Both answers follow the prompt, padded to one length.
_PREFERENCES = (
    ("prompt_ids", "chosen_ids", "rejected_ids"),
    ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"),
)


def attention_of(model: nn.Module) -> float:
    """Returns `q` of `L + q L^2`: FLOPs of attention per token and context token, divided by FLOPs of the matrices.

    In the forward pass, a token costs `2 num_weights` in the matrices and `4 hidden_size num_layers` per context token
    in attention (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1). The backward pass costs twice
    as much, but for frozen matrices, as with LoRA, as much as the forward pass. Fused causal kernels skip the masked
    half, which is assumed for all models. 0 if the model's config does not have its shape.
    """
    config = text_config(model)
    hidden_size, num_layers = (getattr(config, n, None) for n in ("hidden_size", "num_hidden_layers"))
    modules: list[Any] = list(model.modules())
    # Sizes come from attributes, because weights of quantized layers are packed. PEFT's layers repeat the sizes of
    # their base layers.
    matrices = [m for m in modules if hasattr(m, "in_features") and hasattr(m, "out_features")]
    num_weights = sum(int(m.in_features) * int(m.out_features) for m in matrices if not hasattr(m, "base_layer"))
    if not isinstance(hidden_size, int) or not isinstance(num_layers, int) or not num_weights:
        return 0.0
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    attention = 3 * 4 * hidden_size * num_layers / 2
    return attention / ((2 if num_trained < num_weights / 2 else 3) * 2 * num_weights)


def as_collated(lengths: list[int], loader: Any, cost: CostModel) -> tuple[list[int], CostModel]:
    """Finds out how the collator pads, by collating the shortest and the longest sample.

    Returns:
        The lengths, truncated as by the collator, and the cost model with its padding.

    Raises:
        SetupError: The collator makes rows longer than their lengths, so that a plan could exceed the memory.
    """
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    # Two rows each, because some collators need more than one.
    alike, both = (_collated(loader, [shortest, other]) for other in (shortest, longest))
    least, widest = alike["input_ids"].shape[-1], both["input_ids"].shape[-1]
    collator = getattr(loader.collate_fn, "data_collator", loader.collate_fn)  # The Trainer's wrapper removes columns.
    padded = dataclasses.replace(cost, pad_multiple=int(getattr(collator, "pad_to_multiple_of", None) or 1))
    if both["input_ids"].shape[0] == 1 and widest <= padded.padded(lengths[shortest] + lengths[longest]):
        return lengths, dataclasses.replace(cost, is_padded=False)
    # A collator may truncate long rows.
    cut = [min(length, widest) for length in lengths]
    if least > padded.padded(cut[shortest]) or widest > padded.padded(cut[longest]):
        raise SetupError(
            f"the collator turns a row of {lengths[shortest]} tokens into {least}, and one of {lengths[longest]} into "
            f"{widest}",
            hint="Let it pad to the longest row of the batch.",
        )
    return cut, padded


def _collated(loader: Any, rows: Sequence[int]) -> Mapping[str, Any]:
    """Collates two rows. `input_ids` has the shape (2, longest), or (1, all tokens) if the collator packs."""
    two = [loader.dataset[i] for i in rows]
    try:
        batch = loader.collate_fn(two)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # The collator of a script with one row per micro-batch need not pad.
        raise SetupError(
            f"the collator cannot put two rows together ({type(error).__name__}: {str(error)[:100]})",
            hint="Set balance='off', or let it pad.",
        ) from error
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise SetupError("the collator makes no input_ids", hint="Set balance='off'.")
    more = [n for n, v in batch.items() if isinstance(v, torch.Tensor) and v.numel() > ids.numel()]
    if more:
        # The plan does not count them, so a micro-batch could exceed the memory.
        raise SetupError(f"rows have inputs larger than input_ids: {', '.join(more)}", hint="Set balance='off'.")
    found: Mapping[str, Any] = batch
    return found


class Stopwatch:
    """Times a forward and backward pass from its start until its last gradient is computed.

    The first trainable parameter of the model gets its gradient last. DDP waits for other ranks after that, at the end
    of the backward pass. On a GPU, events of the device are used, which the host does not wait for.

    Attributes:
        last_gradient: Time of the last gradient: `time.perf_counter()`, or a device event; None if there is none.
        lap: The latest pass; None if the parameter got no gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.last_gradient: Any = None
        self.lap: Lap | None = None

    @contextmanager
    def timing(self, model: nn.Module) -> Iterator[None]:
        """Surrounds a pass."""
        self.last_gradient, begin = None, moment(self._device)
        with ExitStack() as stack:
            if (first := next((p for p in model.parameters() if p.requires_grad), None)) is not None:
                stack.callback(first.register_post_accumulate_grad_hook(self._arrived).remove)
            yield
        self.lap = None if self.last_gradient is None else Lap(begin, self.last_gradient)

    def _arrived(self, _: torch.Tensor) -> None:
        self.last_gradient = moment(self._device)


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
