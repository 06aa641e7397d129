"""What can be seen of a loss while it is computed: dropout, class weights, and how its value was put together."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unsloth_multigpu.step.weighing import IGNORED

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
_CLASS_LOSSES = {functional.cross_entropy, functional.nll_loss}
# Names of autograd's nodes, without "Backward" and its number, through which a scalar only passes, or is added up.
_LINEAR = {
    "Add",
    "Sub",
    "Neg",
    "Sum",
    "Nansum",
    "Mean",
    "Stack",
    "Cat",
    "Alias",
    "Clone",
    "Copy",
    "ToCopy",
    "Identity",
    "View",
    "UnsafeView",
    "Reshape",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Permute",
    "T",
    "Transpose",
    "Select",
    "Slice",
    "AsStrided",
    "Contiguous",
    "NanToNum",
    "Rsub",
    "Unbind",
    "Split",
    "Index",
    "CopySlices",
}
# Linear in each operand.
_PRODUCTS = {"Mul", "Div", "Dot", "Mv"}


class LossObserver(TorchFunctionMode):
    """Switches dropout off, and notes how class losses are called.

    Not by `model.eval()`: what else a model does in training is to be seen, and some quantised layers repack their
    weights when they leave it (`bitsandbytes.nn.Linear4bit` on the CPU).

    Attributes:
        class_weights: Weights of the classes, where every class loss that has some has the same.
        ignores: Every class loss leaves out labels of -100.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tables: set[tuple[float, ...]] = set()
        self._ignored: set[int] = set()

    @property
    def class_weights(self) -> tuple[float, ...]:
        return next(iter(self._tables)) if len(self._tables) == 1 else ()

    @property
    def ignores(self) -> bool:
        return self._ignored == {IGNORED}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.update({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        elif func is functional.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        elif func in _CLASS_LOSSES:
            self._note(inspect.signature(func).bind(*args, **kwargs).arguments)
        return func(*args, **kwargs)

    def _note(self, arguments: Mapping[str, Any]) -> None:
        self._ignored.add(int(arguments.get("ignore_index", IGNORED)))
        weight = arguments.get("weight")
        if isinstance(weight, torch.Tensor) and weight.numel() <= _MOST_CLASSES:
            self._tables.add(tuple(weight.detach().double().tolist()))


def is_linear_in_means(loss: torch.Tensor, num_rows: int) -> bool:
    """False where a loss is made from means, or sums, by more than adding them up with constant factors.

    Such a loss is not a mean over rows, even where a trial finds it near to one: the absolute value of a mean minus a
    constant, its root, its power, its logarithm. Read from the graph that autograd has kept, from the loss back to the
    first tensors of more than one element.

    Args:
        loss: Scalar.
        num_rows: Rows of the micro-batch: what is computed as often is computed for each of them.
    """
    found: Counter[str] = Counter()
    depends: dict[Any, bool] = {}
    seen: set[Any] = set()
    stack = [] if loss.grad_fn is None else [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        inputs = [(n, nr) for n, nr in node.next_functions if n is not None]
        if not inputs or any(not _is_scalar(*given) for given in inputs):
            continue  # A parameter, or what makes a scalar of more.
        from_rows = [n for n, _ in inputs if _depends_on_rows(n, depends)]
        name = node.name().partition("Backward")[0].rpartition("::")[2]
        if from_rows and name not in _LINEAR and not (name in _PRODUCTS and _is_factor_constant(node, name, depends)):
            found[name] += 1
        stack.extend(n for n, _ in inputs)
    return all(count % num_rows == 0 for count in found.values()) if num_rows > 1 else True


def _is_factor_constant(node: Any, name: str, depends: dict[Any, bool]) -> bool:
    """True where one operand of a product, or the denominator, has nothing of the rows in it."""
    first, second = (n is not None and _depends_on_rows(n, depends) for n, _ in (*node.next_functions, (None, 0))[:2])
    return not second if name == "Div" else not (first and second)


def _is_scalar(node: Any, output: int) -> bool:
    if hasattr(node, "variable"):
        return bool(node.variable.numel() == 1)
    metadata = getattr(node, "_input_metadata", None)
    if not metadata or output >= len(metadata):
        return False
    return all(size == 1 for size in metadata[output].shape)


def _depends_on_rows(node: Any, known: dict[Any, bool]) -> bool:
    """True where more than scalar parameters went into it."""
    stack = [node]
    while stack:
        current = stack[-1]
        if current in known:
            stack.pop()
            continue
        inputs = [(n, nr) for n, nr in current.next_functions if n is not None]
        if hasattr(current, "variable"):
            known[current] = False
        elif any(not _is_scalar(*given) for given in inputs):
            known[current] = True
        elif waiting := [n for n, _ in inputs if n not in known]:
            stack.extend(waiting)
            continue
        else:
            known[current] = any(known[n] for n, _ in inputs)
        stack.pop()
    return known[node]
