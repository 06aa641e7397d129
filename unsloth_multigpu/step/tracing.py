"""Follows how a trainer makes its metrics from what it gathers, so that they can be made from several ranks' parts.

TRL's losses gather numbers of a micro-batch over ranks and reduce them: `(gather(x).sum() / gather(n).sum()).item()`.
Where a micro-batch is shared by ranks, each gather gets one part of it. What is done with the gathered values says how
the metric of the whole is found: here as sum of sums over sum of sums, and not as a mean of quotients.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

_NUM_FRAMES = 8
# [operation, operand, ...]: a reduction of gathered values ["sum", place], or what is computed from such.
Expression = Any
# A reduction's part: [sum, mean or extreme, its count, 1 where that count is only the number of rows].
Parts = dict[str, list[float]]

_SUMS = ("sum", "nansum")
_MEANS = ("mean", "nanmean")
_LEAST, _GREATEST = ("min", "amin"), ("max", "amax")
_REDUCTIONS = (*_SUMS, *_MEANS, *_LEAST, *_GREATEST)
_LAID_OUT = ("clone", "contiguous", "view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze")
_UNCHANGED = ("detach", "float", "double", "to", "cpu", "cuda", *_LAID_OUT)
_CLAMPS = ("clamp", "clamp_min", "clamp_max")
_ELEMENTWISE = (*_CLAMPS, "abs", "neg", "exp", "log", "sqrt", "square", "sigmoid", "isnan", "nan_to_num")
_BINARY: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
}
_UNARY: dict[str, Callable[..., float]] = {
    "abs": abs,
    "neg": operator.neg,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "square": lambda x: x * x,
    "clamp": lambda x, low, high: min(max(x, -math.inf if low is None else low), math.inf if high is None else high),
}
_NAMES = {"true_divide": "div", "__truediv__": "div", "floor_divide": "floordiv", "__floordiv__": "floordiv"}
_REVERSED = {"__rsub__": "sub", "rsub": "sub", "__rdiv__": "div", "__rtruediv__": "div"}


class Trace:
    """What one micro-batch's metrics are made of.

    Args:
        num_rows: Rows of the micro-batch, the weight of a mean whose own is not known.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._seen: Counter[str] = Counter()
        self._parts: dict[str, tuple[Any, Any, bool]] = {}

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to follow what is gathered."""
        place = _place()
        self._seen[place] += 1
        gathered = tensor[None] if tensor.dim() == 0 else tensor
        return _Gathered.made(self, gathered, f"{place}#{self._seen[place]}", is_entries=True)

    def reduced(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """The same for a number that is reduced over ranks at once."""
        is_followed = tensor.dim() == 0 and reduction in ("sum", "mean")
        return getattr(self.enter(tensor), reduction)() if is_followed else tensor

    def note(self, name: str, place: str, entries: torch.Tensor, result: torch.Tensor) -> Expression:
        """Keeps this rank's part of a reduction."""
        count: Any = 1
        # One number for several rows is a mean itself, of something.
        is_mean_of_means = name in _MEANS and entries.numel() == 1 and self._num_rows > 1
        if name in _MEANS:
            count = (~entries.isnan()).sum() if name == "nanmean" else entries.numel()
            count = count * self._num_rows if is_mean_of_means else count
        self._parts[f"{name} {place}"] = (result.detach(), count, is_mean_of_means)
        return [name, place]

    def parts(self) -> Parts:
        """All parts, read from the device at once."""
        if not self._parts:
            return {}
        flat = [x for part in self._parts.values() for x in part]
        tensors = [x.reshape(()).double() for x in flat if isinstance(x, torch.Tensor)]
        read = iter(torch.stack(tensors).tolist())
        numbers = iter([next(read) if isinstance(x, torch.Tensor) else float(x) for x in flat])
        return {name: [next(numbers) for _ in part] for name, part in self._parts.items()}


def _place() -> str:
    """The place of a call in the program: the same on all ranks, whatever else each of them did."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    # A function that several metrics share is told apart by who calls it.
    while frame is not None and len(names) < _NUM_FRAMES:
        names.append(f"{frame.f_code.co_name}:{frame.f_lasti}")
        frame = frame.f_back
    return "<".join(names)


class _Gathered(torch.Tensor):
    """Values that a loss gathered, or a number made from them, with where they are from."""

    _trace: Trace
    _source: Expression
    # True for values, each of which may be of another row; False for a number with an expression.
    _is_entries: bool

    @classmethod
    def made(cls, trace: Trace, tensor: torch.Tensor, source: Expression, *, is_entries: bool) -> torch.Tensor:
        gathered = tensor.as_subclass(cls)
        gathered._trace, gathered._source, gathered._is_entries = trace, source, is_entries
        return gathered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not isinstance(result, (torch.Tensor, int, float)) or isinstance(result, bool):
            return result
        first = next((a for a in args if isinstance(a, cls)), None)
        if first is None:
            return result
        name = func.__name__
        if name in _REVERSED:
            name, args = _REVERSED[name], args[::-1]
        followed = _follow(_NAMES.get(name, name), args, kwargs, result)
        if followed is None:
            return result
        source, is_entries = followed
        if not isinstance(result, torch.Tensor):
            return number(result, source)
        return cls.made(first._trace, result, source, is_entries=is_entries)


def _follow(name: str, args: Any, kwargs: Any, result: Any) -> tuple[Expression, bool] | None:
    """What `result` is made from, and whether it is values still; None where that is not understood."""
    first = args[0]
    if name in _BINARY and len(args) == 2 and not kwargs:
        return _both(name, *args)
    if not isinstance(first, _Gathered):
        return None
    if name in _UNCHANGED:
        return first._source, first._is_entries
    if name in _REDUCTIONS and len(args) == 1 and set(kwargs) <= {"dtype"} and isinstance(result, torch.Tensor):
        if first._is_entries:
            with torch._C.DisableTorchFunctionSubclass():
                return first._trace.note(name, first._source, first, result), False
        return first._source, False
    if name == "item" and not first._is_entries:
        return first._source, False
    if name in _ELEMENTWISE:
        if first._is_entries:
            return f"{first._source}.{name}{args[1:]}{sorted(kwargs.items())}", True
        limits = _limits(name, args[1:], kwargs)
        return None if limits is None else (limits(first._source), False)
    return None


def _limits(name: str, args: Any, kwargs: Mapping[str, Any]) -> Callable[[Expression], Expression] | None:
    """An operation on one number, written down; None for one that cannot be done again from that."""
    if name in _CLAMPS:
        low = kwargs.get("min", args[0] if args and name != "clamp_max" else None)
        high = kwargs.get("max", args[-1] if len(args) > 1 or (args and name == "clamp_max") else None)
        if any(isinstance(limit, torch.Tensor) for limit in (low, high)):
            return None
        return lambda source: ["clamp", source, low, high]
    return (lambda source: [name, source]) if name in _UNARY and not args and not kwargs else None


def _both(name: str, left: Any, right: Any) -> tuple[Expression, bool] | None:
    sources: list[tuple[Expression, bool | None]] = []
    for operand in (left, right):
        if isinstance(operand, _Gathered):
            sources.append((operand._source, operand._is_entries))
        elif isinstance(operand, (int, float)):
            sources.append((getattr(operand, "source", operand), None))
        else:
            return None
    kinds = {is_entries for _, is_entries in sources} - {None}
    (a, _), (b, _) = sources
    if kinds == {False}:
        return [name, a, b], False
    if kinds != {True} or any(isinstance(s, list) for s in (a, b)):
        return None
    tensors = [x for x in (left, right) if isinstance(x, torch.Tensor)]
    if len({x.shape for x in tensors}) > 1:
        return None  # One is spread over the other.
    return f"({a} {name} {b})", True


class _Float(float):
    source: Expression


class _Int(int):
    source: Expression


def number(value: float, source: Expression) -> float:
    """A Python number that remembers what it is made from."""
    made: Any = (_Int if isinstance(value, int) else _Float)(value)
    made.source = source
    return made  # type: ignore[no-any-return]


def source_of(value: Any) -> Expression:
    """What a number is made from; None where that is not known."""
    return getattr(value, "source", None)


def plain(value: Any) -> Any:
    """The same without its memory."""
    return int(value) if isinstance(value, _Int) else float(value) if isinstance(value, _Float) else value


def _arithmetic(name: str, *, is_reversed: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        mine, its = plain(self), plain(other)
        pair, sources = (mine, its), (self.source, getattr(other, "source", its))
        if is_reversed:
            pair, sources = pair[::-1], sources[::-1]
        return number(_BINARY[name](*pair), [name, *sources])

    return method


for _class in (_Float, _Int):
    for _name, _dunder in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "truediv"), ("floordiv",) * 2):
        setattr(_class, f"__{_dunder}__", _arithmetic(_name, is_reversed=False))
        setattr(_class, f"__r{_dunder}__", _arithmetic(_name, is_reversed=True))


class NotThere(Exception):
    """A value is not defined: nothing was gathered, or its count is zero."""


def evaluate(expression: Expression, parts: Mapping[str, list[float]]) -> float:
    """The number that an expression makes of `parts`.

    Raises:
        NotThere: Nothing was gathered for a part of it, or of no element.
    """
    if not isinstance(expression, list):
        return float(expression)
    name, *operands = expression
    if name in _REDUCTIONS:
        value, count, _ = parts.get(f"{name} {operands[0]}", (0.0, 0.0, 0.0))
        if not count:
            raise NotThere
        return value
    numbers: Any = [None if o is None else evaluate(o, parts) for o in operands]
    if name in ("div", "floordiv") and numbers[1] == 0:
        raise NotThere
    return float((_BINARY.get(name) or _UNARY[name])(*numbers))


def merged(all_parts: Sequence[Parts]) -> Parts:
    """The parts of a whole from those of its pieces."""
    whole: Parts = {}
    for name in {name for parts in all_parts for name in parts}:
        found = [parts[name] for parts in all_parts if name in parts and parts[name][1]]
        kind, count = name.partition(" ")[0], sum(n for _, n, _ in found)
        if kind in _MEANS:
            value = sum(v * n for v, n, _ in found) / max(count, 1)
        elif kind in _SUMS:
            value = sum(v for v, _, _ in found)
        else:
            value = (min if kind in _LEAST else max)((v for v, _, _ in found), default=0.0)
        whole[name] = [value, count, max((guessed for _, _, guessed in found), default=0.0)]
    return whole


def is_guessed(expression: Expression, parts: Mapping[str, list[float]]) -> bool:
    """True where a mean enters that was weighted by rows, because what it is a mean of is not known."""
    if not isinstance(expression, list):
        return False
    name, *operands = expression
    if name in _REDUCTIONS:
        return bool(parts.get(f"{name} {operands[0]}", (0.0, 0.0, 0.0))[2])
    return any(is_guessed(operand, parts) for operand in operands)
