"""Bytes of the optimizers of `TrainingArguments.optim`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unsloth_multigpu.errors import SetupError

# bitsandbytes quantises the states of tensors of at least so many elements, in blocks of so many.
_SMALLEST_8BIT, _BLOCK = 4096, 256
_TABLE_BYTES = 256 * 4


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps and needs.

    Args:
        states: Tensors as large as the parameter.
        item_bytes: Of one element of them; None = as the parameter has.
        per_tensor_bytes: Beside them, for each parameter: a count of steps, say.
        bits8: States in blocks of 8 bit, as bitsandbytes has them.
        factored: States of matrices are one row and one column, in float32.
        copies: Of all trainable parameters, which exist while an update is computed on a GPU.
    """

    states: int
    item_bytes: int | None = None
    per_tensor_bytes: int = 0
    bits8: bool = False
    factored: bool = False
    copies: int = 0

    def state_bytes(self, shape: tuple[int, ...], item_bytes: int, *, embedding: bool) -> int:
        """Of one parameter.

        Args:
            shape: Of the parameter, or of this rank's part of it.
            item_bytes: Of one of its elements.
            embedding: It is the weight of an `nn.Embedding`.
        """
        numel = math.prod(shape)
        if self.factored:
            vectors = numel // shape[-1] + numel // shape[-2] if len(shape) >= 2 else numel
            return 4 * vectors + self.per_tensor_bytes
        if self.bits8 and numel >= _SMALLEST_8BIT and not embedding:
            return self.states * (numel + 4 * -(-numel // _BLOCK)) + self.per_tensor_bytes
        return self.states * numel * (self.item_bytes or item_bytes) + self.per_tensor_bytes

    def table_bytes(self) -> int:
        """What all parameters share."""
        return min(self.states, 2) * _TABLE_BYTES if self.bits8 else 0


_ADAM = Optimizer(2, per_tensor_bytes=4, copies=1)
_FUSED = replace(_ADAM, copies=0)
_ADAM_8BIT, _ADAM_32BIT = Optimizer(2, bits8=True, item_bytes=4), Optimizer(2, item_bytes=4)
_LION_8BIT, _LION_32BIT = Optimizer(1, bits8=True, item_bytes=4), Optimizer(1, item_bytes=4)
_KNOWN: Mapping[str, Optimizer] = {
    "adamw_torch": _ADAM,
    "adamw_hf": _ADAM,
    "adamw_torch_fused": _FUSED,
    "adamw_torch_xla": _FUSED,
    "adamw_torch_npu_fused": _FUSED,
    "adamw_apex_fused": _ADAM_32BIT,
    "adamw_bnb_8bit": _ADAM_8BIT,
    "adamw_8bit": _ADAM_8BIT,
    "paged_adamw_8bit": _ADAM_8BIT,
    "paged_adamw_32bit": _ADAM_32BIT,
    "lion_8bit": _LION_8BIT,
    "paged_lion_8bit": _LION_8BIT,
    "lion_32bit": _LION_32BIT,
    "paged_lion_32bit": _LION_32BIT,
    "rmsprop_bnb": _LION_32BIT,
    "rmsprop_bnb_32bit": _LION_32BIT,
    "rmsprop_bnb_8bit": _LION_8BIT,
    "sgd": Optimizer(0),
    "adagrad": Optimizer(1, per_tensor_bytes=4, copies=1),
    "rmsprop": Optimizer(1, per_tensor_bytes=4, copies=1),
    # The root of the mean square of each tensor is kept as well.
    "adafactor": Optimizer(0, factored=True, per_tensor_bytes=4),
}
# Those whose names do not say so.
_OF_BITSANDBYTES = {"adamw_8bit", "lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit"}
_ONE_MORE_STATE = {"sgd": ("momentum",), "rmsprop": ("momentum", "centered")}


def optimizer_of(name: str, arguments: Mapping[str, str] | None = None) -> Optimizer:
    """What the optimizer of that name needs.

    Args:
        name: `TrainingArguments.optim`.
        arguments: `TrainingArguments.optim_args`.

    Raises:
        SetupError: Nothing is known of it.
    """
    if name not in _KNOWN:
        raise SetupError(
            f"optim={name!r}: how much memory this optimizer needs is not known.",
            hint=f"Known are {', '.join(sorted(_KNOWN))}. Without a forecast set shard='on' or shard='off'.",
        )
    given = arguments or {}
    more = sum(_is_set(given.get(argument, "")) for argument in _ONE_MORE_STATE.get(name, ()))
    return replace(_KNOWN[name], states=_KNOWN[name].states + more)


def trains_parts(name: str, *, with_unsloth: bool) -> bool:
    """True where the optimizer can train the parts of a model that FSDP2 has divided.

    bitsandbytes' optimizers know plain tensors only; Unsloth's FSDP2 (2026.10.9) hands Adam and AdamW those.
    transformers' Adafactor mixes the parts with whole rows and columns.

    Args:
        name: `TrainingArguments.optim`.
        with_unsloth: Unsloth divides the model.
    """
    is_of_bitsandbytes = "bnb" in name or name.startswith("paged_") or name in _OF_BITSANDBYTES
    return name != "adafactor" and (not is_of_bitsandbytes or (with_unsloth and "adam" in name))


def is_paged(name: str) -> bool:
    """True where the driver may move states to the host's memory. They are counted in full."""
    return name.startswith("paged_")


def _is_set(value: str) -> bool:
    try:
        return float(value) != 0
    except ValueError:
        return value.lower() in ("true", "yes")
