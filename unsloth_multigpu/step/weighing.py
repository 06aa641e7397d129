"""What the mean in a loss is taken over: the weight of a part of a micro-batch among its other parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.group.precision import sum_dtype

IGNORED = -100
ROWS, SUM = "rows", "sum"
# Labels that are predicted from the token before lose the first of each row.
NEXT, TOKENS = "next tokens", "tokens"
_LABELLED_ROWS, _NEXT_LABELLED_ROWS = "labelled rows", "rows with a next token"
_CLASSES, _NEXT_CLASSES = "class weights", "class weights of next tokens"
_OF = " of "
# The dimensions that labels need for it.
_OF_LABELS = {NEXT: 1, TOKENS: 1, _LABELLED_ROWS: 2, _NEXT_LABELLED_ROWS: 2, _CLASSES: 1, _NEXT_CLASSES: 2}
# Sums of one of the inputs, such as weights of rows or tokens: of all its values, of those with a label, and the same
# where labels are those of the next token.
_ALL, _LABELLED, _AFTER_FIRST, _NEXT_LABELLED = "sum", "labelled sum", "sum after first", "next labelled sum"


def weight_of(inputs: Mapping[str, Any], weighing: str, class_weights: Sequence[float] = ()) -> float:
    """The weight of a part of a micro-batch: how much its mean is taken over.

    Args:
        inputs: The part, collated.
        weighing: One of `candidates`.
        class_weights: Weight of each class, where labels are weighted by their class.

    Returns:
        Rows, labels, or a sum of weights; 1 where losses of parts add up ("sum").

    Raises:
        SetupError: These inputs do not have what the weighing adds up, see `obstacle`.
    """
    if weighing == SUM:
        return 1.0
    if weighing == ROWS:
        return float(count_rows(inputs))
    if why := obstacle(inputs, weighing):
        raise SetupError(
            f'The loss of a part of a micro-batch counts by "{weighing}", as it did in the first step, '
            f"and that cannot be computed here: {why}.",
            hint="Let the collator give every micro-batch these columns, in the same form. Or let the loss be a sum "
            "divided by num_items_in_batch, or use global_batch='scale'.",
        )
    labels: Any = inputs.get("labels")
    if weighing in (NEXT, TOKENS):
        if labels.dim() < 2 and (weighing == NEXT or labels.is_floating_point()):
            return float(len(labels))
        return float(_shifted(labels, weighing == NEXT).ne(IGNORED).sum())
    if weighing in (_LABELLED_ROWS, _NEXT_LABELLED_ROWS):
        return float(_shifted(labels, weighing == _NEXT_LABELLED_ROWS).ne(IGNORED).any(1).sum())
    if weighing in (_CLASSES, _NEXT_CLASSES):
        table = torch.tensor(class_weights, dtype=sum_dtype(labels.device), device=labels.device)
        counted = _shifted(labels, weighing == _NEXT_CLASSES)
        return float(table[counted[counted.ne(IGNORED)]].sum())
    kind, _, name = weighing.partition(_OF)
    values = _shifted(inputs[name], kind in (_AFTER_FIRST, _NEXT_LABELLED))
    values = values.to(sum_dtype(values.device))
    if kind in (_LABELLED, _NEXT_LABELLED):
        values = values * _shifted(labels, kind == _NEXT_LABELLED).ne(IGNORED)
    return float(values.sum())


def obstacle(inputs: Mapping[str, Any], weighing: str) -> str:
    """Why a weighing cannot be computed for these inputs; "" = it can.

    A part of a micro-batch, or a later one, may be of other shapes than that for which it was a candidate: padded to a
    width of its own, without a column, or with lists where the lengths of rows differ. Shapes that torch would
    broadcast are no less wrong.

    Args:
        inputs: A collated micro-batch, or a part of one.
        weighing: One of `candidates` of other inputs.
    """
    if weighing in (ROWS, SUM):
        return ""
    labels: Any = inputs.get("labels")
    num_dims = labels.dim() if isinstance(labels, torch.Tensor) else 0
    if weighing in _OF_LABELS:
        has_dims = num_dims >= _OF_LABELS[weighing]
        has_type = has_dims and not (weighing in (_CLASSES, _NEXT_CLASSES) and labels.is_floating_point())
        return "" if has_type else f"labels are {_form(labels)}"
    kind, _, name = weighing.partition(_OF)
    values = inputs.get(name)
    is_next = kind in (_AFTER_FIRST, _NEXT_LABELLED)
    if not isinstance(values, torch.Tensor) or values.dim() < (2 if is_next else 1) or values.is_complex():
        return f"{name} is {_form(values)}"
    if kind in (_LABELLED, _NEXT_LABELLED) and (not num_dims or labels.shape != values.shape):
        return f"labels are {_form(labels)} and {name} is {_form(values)}"
    return ""


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size = " x ".join(map(str, value.shape)) or "one number"
        return f"{size} of {str(value.dtype).removeprefix('torch.')}"
    return "missing" if value is None else f"of type {type(value).__name__}"


def candidates(inputs: Mapping[str, Any], num_classes: int = 0) -> Iterator[str]:
    """Weighings that are tried for the loss of these inputs, the likeliest first where several fit.

    Class weights that were seen come first: where all labels are of one class, rows would fit as well.

    Args:
        inputs: A collated micro-batch.
        num_classes: Number of class weights that the loss was seen to use.
    """
    labels: Any = inputs.get("labels")
    has_classes = isinstance(labels, torch.Tensor) and not labels.is_floating_point()
    has_tokens = has_classes and labels.dim() >= 2
    if num_classes and has_classes:
        valid = labels[labels.ne(IGNORED)]
        if valid.numel() and int(valid.min()) >= 0 and int(valid.max()) < num_classes:
            yield _CLASSES
            if has_tokens:
                yield _NEXT_CLASSES
    # Of rows with one label each, models average the labels.
    if has_tokens:
        yield NEXT
        yield TOKENS
    elif has_classes:
        yield TOKENS
    yield ROWS
    yield SUM
    if has_tokens and labels.dim() == 2:
        yield _LABELLED_ROWS
        yield _NEXT_LABELLED_ROWS
    rows = count_rows(inputs)
    for name, value in inputs.items():
        is_weight = isinstance(value, torch.Tensor) and value.dim() in (1, 2) and name not in ("labels", "input_ids")
        if not is_weight or value.is_complex() or len(value) != rows or bool((value < 0).any()):
            continue
        is_aligned = has_classes and value.shape == labels.shape
        yield _ALL + _OF + name
        if is_aligned:
            yield _LABELLED + _OF + name
        if value.dim() == 2:
            yield _AFTER_FIRST + _OF + name
        if is_aligned and value.dim() == 2:
            yield _NEXT_LABELLED + _OF + name


def count_rows(inputs: Mapping[str, Any]) -> int:
    """Rows of a collated micro-batch: the first dimension of its labels, or of the first tensor that has one."""
    labels = inputs.get("labels")
    tensors = [labels, *inputs.values()]
    return next((len(t) for t in tensors if isinstance(t, torch.Tensor) and t.dim()), 1)


def without_effect(loss: torch.Tensor) -> torch.Tensor:
    """Zero, with a gradient of zero for each parameter: lets a rank take part in the exchange without an effect."""
    if bool(torch.isfinite(loss)):
        return loss * 0.0
    # Zero times NaN is NaN. Sum the same parameters instead, without the computation in between.
    parameters, seen, stack = [], set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Checkpoint" in node.name():
            return loss * 0.0  # It has parameters that cannot be seen.
        if hasattr(node, "variable"):
            parameters.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    zero = sum((p.reshape(-1)[:1].sum() * 0.0 for p in parameters), start=torch.zeros_like(loss))
    return zero if zero.requires_grad else loss * 0.0


def _shifted(values: torch.Tensor, is_shifted: bool) -> torch.Tensor:
    return values[:, 1:] if is_shifted else values
