"""Computes a training's forward pass without dropout, and notes the class weights that its losses use."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MOST_CLASSES = 10_000
_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.feature_dropout,
}
# What all of them begin with.
_DROPOUT = inspect.signature(lambda input, p=0.5, training=True, inplace=False, **_: None)
_CLASS_LOSSES = {functional.cross_entropy, functional.nll_loss}


class Still(TorchFunctionMode):
    """Switches dropout off, and notes class weights.

    Not by `model.eval()`: what else a model does in training is to be seen, and some quantised layers repack their
    weights when they leave it (`bitsandbytes.nn.Linear4bit` on the CPU).

    Attributes:
        has_dropped: There was a dropout to switch off.
        has_drawn: Random numbers were drawn all the same. Whoever opens it sets this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_dropped = self.has_drawn = False
        self._tables: set[tuple[float, ...]] = set()

    @property
    def class_weights(self) -> tuple[float, ...]:
        """Weights of the classes, where every class loss that has some has the same."""
        return next(iter(self._tables)) if len(self._tables) == 1 else ()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            given = _bound(_DROPOUT, args, kwargs)
            self.has_dropped |= bool(given["p"] and given["training"])
            return given["input"]
        if func is functional.scaled_dot_product_attention:
            self.has_dropped |= bool((args[4:5] or (kwargs.get("dropout_p"),))[0])
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.update({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        elif func is functional.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            self.has_dropped |= bool(bound.arguments["dropout_p"])
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        elif func in _CLASS_LOSSES:
            weight = inspect.signature(func).bind(*args, **kwargs).arguments.get("weight")
            if isinstance(weight, torch.Tensor) and weight.numel() <= _MOST_CLASSES:
                self._tables.add(tuple(weight.detach().double().tolist()))
        return func(*args, **kwargs)


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
