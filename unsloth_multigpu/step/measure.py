"""What was measured of this model, its device and its collator.

The shape of the model says what attention costs, two collated rows say how a batch is padded, and a stopwatch times
micro-batches. `step.balance` plans with all three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.model import text_config
from unsloth_multigpu.group.waits import Lap, moment
from unsloth_multigpu.step.cost import CostModel, attention_factor

# What tells a model where rows begin that lie end to end.
_ROW_BOUNDS = ("position_ids", "seq_idx", "cu_seq_lens_q", "packed_seq_lengths")


def attention_of(model: nn.Module) -> float:
    """The `q` of `step.cost.CostModel`, per token; 0 for a model whose config does not tell its shape."""
    config = text_config(model)
    hidden_size, num_layers = (getattr(config, n, None) for n in ("hidden_size", "num_hidden_layers"))
    modules: list[Any] = list(model.modules())
    # By the names of their sizes: weights of quantised layers are packed. PEFT's layers have the sizes of those that
    # they hold.
    matrices = [m for m in modules if hasattr(m, "in_features") and hasattr(m, "out_features")]
    num_weights = sum(int(m.in_features) * int(m.out_features) for m in matrices if not hasattr(m, "base_layer"))
    if not isinstance(hidden_size, int) or not isinstance(num_layers, int):
        return 0.0
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # transformers' attention layers say it. "eager" computes what it then masks; so does "sdpa" where rows are padded,
    # but the long rows, with which it counts, mostly stand alone. The lengths of an encoder's rows are planned with.
    is_causal = any(getattr(m, "is_causal", False) is True for m in modules)
    is_causal &= not getattr(config, "is_encoder_decoder", False)
    skips = getattr(config, "_attn_implementation", None) != "eager"
    return attention_factor(
        hidden_size, num_layers, num_weights, is_frozen=num_trained < num_weights / 2, is_causal=is_causal and skips
    )


def as_collated(lengths: list[int], loader: Any, cost: CostModel) -> tuple[list[int], CostModel]:
    """Compares the lengths with what the collator makes of the shortest and the longest row, and learns how it pads.

    Raises:
        SetupError: It makes more of them than their lengths say, so that a plan would not hold the limit of memory.
    """
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    # Two rows each: some collators cannot do with one.
    alike, both = (_collated(loader, [shortest, other]) for other in (shortest, longest))
    least, widest = alike["input_ids"].shape[-1], both["input_ids"].shape[-1]
    padded = dataclasses.replace(cost, pad_multiple=_pad_multiple(loader.collate_fn))
    if both["input_ids"].shape[0] == 1:
        total = lengths[shortest] + lengths[longest]
        if widest > padded.padded(total) or not _keeps_rows_apart(both, lengths[shortest]):
            raise SetupError("the collator joins rows without telling them apart", hint="Set balance='off'.")
        return lengths, dataclasses.replace(cost, is_padded=False)
    # A collator may cut what is too long.
    cut = [min(length, widest) for length in lengths]
    if least > padded.padded(cut[shortest]) or widest > padded.padded(cut[longest]):
        raise SetupError(
            f"the collator makes {least} tokens of a row of {lengths[shortest]} and {widest} of one of "
            f"{lengths[longest]}",
            hint="Let it pad to the longest row of the batch.",
        )
    return cut, padded


def _keeps_rows_apart(batch: Mapping[str, Any], length: int) -> bool:
    """True if attention and labels end with the first of two rows that lie end to end, which has `length` tokens."""
    labels = batch.get("labels")
    is_masked = not isinstance(labels, torch.Tensor) or not length or int(labels[0, length]) == -100
    return is_masked and any(name in batch for name in _ROW_BOUNDS)


def _collated(loader: Any, rows: Sequence[int]) -> Mapping[str, Any]:
    """Two rows as the collator makes them: `input_ids` is 2 x longest, or 1 x all where it lays them end to end."""
    two = [loader.dataset[i] for i in rows]
    try:
        batch = loader.collate_fn(two)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # A script of one row in a micro-batch needs no collator that pads.
        raise SetupError(
            f"the collator cannot put two rows together ({type(error).__name__}: {str(error)[:100]})",
            hint="Set balance='off', or let it pad.",
        ) from error
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise SetupError("the collator makes no input_ids", hint="Set balance='off'.")
    more = [n for n, v in batch.items() if isinstance(v, torch.Tensor) and v.numel() > ids.numel()]
    if more:
        # Their size is not counted, so that the limit of memory would not hold.
        raise SetupError(f"rows are more than their tokens: {', '.join(more)}", hint="Set balance='off'.")
    found: Mapping[str, Any] = batch
    return found


def _pad_multiple(collate: Any) -> int:
    # The Trainer wraps a collator that takes columns away.
    inner = getattr(collate, "data_collator", collate)
    return int(getattr(inner, "pad_to_multiple_of", None) or 1)


class Stopwatch:
    """Runs from the start of a micro-batch until the last gradient is there.

    The model's first trainable parameter gets its gradient last. In DDP the wait for other ranks comes after that, at
    the end of the backward pass. On a GPU it reads the device's own clock, and nothing waits for the device.

    Args:
        model: Gives the model whose parameters are trained; asked in the first micro-batch. `model_init` makes it in
            the midst of `train()`.
        device: Where.
    """

    def __init__(self, model: Callable[[], nn.Module], device: torch.device) -> None:
        self._model = model
        # What ends the watching; None = no training is under way.
        self._open: ExitStack | None = None
        self._is_watching = False
        self._device = device
        self._begin: Any = None
        self._end: Any = None

    @contextmanager
    def on_model(self) -> Iterator[None]:
        """Watches the parameter for the time of a training."""
        try:
            with ExitStack() as self._open:
                yield
        finally:
            self._open, self._is_watching = None, False

    def _arrived(self, _: torch.Tensor) -> None:
        self._end = self._now()

    def start(self) -> None:
        """Called before the forward pass."""
        if self._open is not None and not self._is_watching:
            self._is_watching = True
            first = next((p for p in self._model().parameters() if p.requires_grad), None)
            if first is not None:
                self._open.callback(first.register_post_accumulate_grad_hook(self._arrived).remove)
        self._end = None
        self._begin = self._now()

    def lap(self) -> Lap | None:
        """Called after the backward pass; None where the parameter got no gradient."""
        return None if self._end is None else Lap(self._begin, self._end)

    @property
    def last_gradient(self) -> Any:
        """When the last gradient came: `time.perf_counter`, or an event of the device; None where none has come."""
        return self._end

    def _now(self) -> Any:
        return moment(self._device)
