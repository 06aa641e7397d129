"""Measures the model, the device and the collator for the planner.

The shape of the model gives the cost of attention, two collated rows show how batches are padded, and a stopwatch times
micro-batches. `deal.balance` plans with all three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.deal.cost import CostModel, attention_factor
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import text_config
from unsloth_multigpu.group.waits import Lap, moment

# Inputs that tell a model where packed rows begin.
_ROW_BOUNDS = ("position_ids", "seq_idx", "cu_seq_lens_q", "packed_seq_lengths")


def attention_of(model: nn.Module) -> float:
    """Returns `q` of `deal.cost.CostModel`, per token; 0 if the model's config does not have its shape."""
    config = text_config(model)
    hidden_size, num_layers = (getattr(config, n, None) for n in ("hidden_size", "num_hidden_layers"))
    modules: list[Any] = list(model.modules())
    # Sizes come from attributes, because weights of quantized layers are packed. PEFT's layers repeat the sizes of
    # their base layers.
    matrices = [m for m in modules if hasattr(m, "in_features") and hasattr(m, "out_features")]
    num_weights = sum(int(m.in_features) * int(m.out_features) for m in matrices if not hasattr(m, "base_layer"))
    if not isinstance(hidden_size, int) or not isinstance(num_layers, int):
        return 0.0
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # "eager" attention computes the masked half as well. So does "sdpa" for padded rows, but long rows, where attention
    # matters, are mostly alone in a micro-batch. Of encoder-decoder models, the encoder's lengths are planned with.
    is_causal = any(getattr(m, "is_causal", False) is True for m in modules)
    is_causal &= not getattr(config, "is_encoder_decoder", False)
    skips = getattr(config, "_attn_implementation", None) != "eager"
    return attention_factor(
        hidden_size, num_layers, num_weights, is_frozen=num_trained < num_weights / 2, is_causal=is_causal and skips
    )


def as_collated(lengths: list[int], loader: Any, cost: CostModel) -> tuple[list[int], CostModel]:
    """Finds out how the collator pads, by collating the shortest and the longest row.

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
    if both["input_ids"].shape[0] == 1:
        total = lengths[shortest] + lengths[longest]
        if widest > padded.padded(total) or not _keeps_rows_apart(both, lengths[shortest]):
            raise SetupError("the collator joins rows without telling them apart", hint="Set balance='off'.")
        return lengths, dataclasses.replace(cost, is_padded=False)
    # A collator may truncate long rows.
    cut = [min(length, widest) for length in lengths]
    if least > padded.padded(cut[shortest]) or widest > padded.padded(cut[longest]):
        raise SetupError(
            f"the collator makes {least} tokens of a row of {lengths[shortest]} and {widest} of one of "
            f"{lengths[longest]}",
            hint="Let it pad to the longest row of the batch.",
        )
    return cut, padded


def _keeps_rows_apart(batch: Mapping[str, Any], length: int) -> bool:
    """True if two packed rows are separate in attention and labels. The first has `length` tokens."""
    labels = batch.get("labels")
    is_masked = not isinstance(labels, torch.Tensor) or not length or int(labels[0, length]) == -100
    return is_masked and any(name in batch for name in _ROW_BOUNDS)


def _collated(loader: Any, rows: Sequence[int]) -> Mapping[str, Any]:
    """Collates two rows. `input_ids` has the shape (2, longest), or (1, all tokens) if the collator packs."""
    two = [loader.dataset[i] for i in rows]
    try:
        batch = loader.collate_fn(two)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # With one row per micro-batch, a collator need not pad.
        raise SetupError(
            f"the collator cannot put two rows together ({type(error).__name__}: {str(error)[:100]})",
            hint="Set balance='off', or let it pad.",
        ) from error
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise SetupError("the collator makes no input_ids", hint="Set balance='off'.")
    more = [n for n, v in batch.items() if isinstance(v, torch.Tensor) and v.numel() > ids.numel()]
    if more:
        # Their size is not planned with, so a micro-batch could exceed the memory.
        raise SetupError(f"rows are more than their tokens: {', '.join(more)}", hint="Set balance='off'.")
    found: Mapping[str, Any] = batch
    return found


class Stopwatch:
    """Times a micro-batch from its start until its last gradient is computed.

    The first trainable parameter of the model gets its gradient last. DDP waits for other ranks after that, at the end
    of the backward pass. On a GPU, events of the device are used, which the host does not wait for. `model` is called
    in the first micro-batch, since `model_init` makes the model within `train()`.

    Attributes:
        last_gradient: Time of the last gradient: `time.perf_counter()`, or a device event; None if there is none.
    """

    def __init__(self, model: Callable[[], nn.Module], device: torch.device) -> None:
        self._model = model
        # Removes the hook at the end; None = no training is running.
        self._open: ExitStack | None = None
        self._is_watching = False
        self._device = device
        self._begin: Any = None
        self.last_gradient: Any = None

    @contextmanager
    def on_model(self) -> Iterator[None]:
        """Surrounds a training."""
        try:
            with ExitStack() as self._open:
                yield
        finally:
            self._open, self._is_watching = None, False

    def _arrived(self, _: torch.Tensor) -> None:
        self.last_gradient = moment(self._device)

    def start(self) -> None:
        """Called before the forward pass."""
        if self._open is not None and not self._is_watching:
            self._is_watching = True
            first = next((p for p in self._model().parameters() if p.requires_grad), None)
            if first is not None:
                self._open.callback(first.register_post_accumulate_grad_hook(self._arrived).remove)
        self.last_gradient = None
        self._begin = moment(self._device)

    def lap(self) -> Lap | None:
        """Called after the backward pass. Returns None if the parameter got no gradient."""
        return None if self.last_gradient is None else Lap(self._begin, self.last_gradient)
