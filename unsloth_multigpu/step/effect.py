"""Which state can a function reach, and has a call changed it? Compares digests of all state that can be pickled.

A mapped function may count words or number labels besides returning rows. The ranks that read the first one's result
from its cache would have none of that.

Needs no torch.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import sys
import time
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

# Beyond these the state is not looked at, and every rank calls the function itself.
_MAX_BYTES = 256 << 20
_MAX_S = 5.0
# A tensor of more values is known by its version, which counts writes to it.
_MAX_VALUES = 1_000_000
# Their objects change while they work (truncation of a tokenizer, progress of a bar) without a meaning for a script.
# Of these only numbers and texts are looked at, and a tokenizer's number of tokens.
_KNOWN_LIBRARIES = frozenset(
    {
        "accelerate",
        "datasets",
        "huggingface_hub",
        "peft",
        "pyarrow",
        "safetensors",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
        "trl",
        "unsloth",
        "unsloth_multigpu",
        "unsloth_zoo",
    }
)
# What pickling an object that was not made for it raises. RecursionError is a RuntimeError.
_NOT_PICKLED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    ReferenceError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.PicklingError,
)


def state_digest(*roots: Any) -> str | None:
    """A digest of what the roots hold and reach; None where that is too much to look at, or cannot be.

    Functions of the script and of its own modules are followed into closures, defaults, and the globals that they name;
    functions of installed libraries into closures and defaults. Objects that cannot be pickled (locks, open files)
    count as unchanged.
    """
    sink = _Sink()
    try:
        _Walk(sink, protocol=5).dump(roots)
    except (_TooMuchError, *_NOT_PICKLED):
        return None
    return sink.digest.hexdigest()


class _TooMuchError(Exception):
    """The limits are reached."""


class _Sink:
    """A file that keeps a digest of what is written."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._num_bytes = 0
        self._deadline = time.monotonic() + _MAX_S

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._num_bytes += size
        if self._num_bytes > _MAX_BYTES or time.monotonic() > self._deadline:
            raise _TooMuchError
        self.digest.update(data)
        return size


class _Walk(pickle.Pickler):
    """Describes functions, classes and modules by their contents, where pickle itself only names them."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if obj is str:
            return NotImplemented  # Below, it means "something of this name and these contents".
        describe = _DESCRIBE.get(kind)
        if describe is not None:
            return describe(obj)
        if isinstance(obj, type):
            return _of_class(obj)
        if (found := _of_torch(obj)) is not None:
            return found
        if kind.__module__.partition(".")[0] in _KNOWN_LIBRARIES or kind.__module__.startswith("Unsloth"):
            return _named(kind.__qualname__, _scalars(obj))
        if hasattr(obj, "cache_info") and hasattr(obj, "__wrapped__"):
            return _named("cached", obj.__wrapped__)
        try:
            reduced = obj.__reduce_ex__(5)
        except _NOT_PICKLED:
            return _named(kind.__qualname__)
        return _named(reduced) if isinstance(reduced, str) else reduced


def _named(name: str, contents: Any = None) -> tuple[Any, ...]:
    # As a state, which pickle writes after it has noted the object: contents may lead back to it.
    return (str, (name,), contents)


def _of_function(function: FunctionType) -> tuple[Any, ...]:
    contents: dict[str, Any] = {
        "closure": function.__closure__,
        "defaults": function.__defaults__,
        "keywords": function.__kwdefaults__,
        "attributes": {k: v for k, v in vars(function).items() if k != "__wrapped__"},
        "wrapped": getattr(function, "__wrapped__", None),
    }
    if not is_library(function.__module__ or ""):
        names = set(_names_in(function.__code__)) & function.__globals__.keys()
        contents["globals"] = {name: function.__globals__[name] for name in sorted(names)}
    return _named(function.__qualname__, contents)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _of_cell(cell: CellType) -> tuple[Any, ...]:
    try:
        return _named("cell", [cell.cell_contents])
    except ValueError:
        return _named("empty cell")


def _of_class(cls: type) -> tuple[Any, ...]:
    if is_library(cls.__module__):
        return _named(f"{cls.__module__}.{cls.__qualname__}")
    contents = {
        name: (value.fget, value.fset) if isinstance(value, property) else getattr(value, "__func__", value)
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType) or not name.startswith(("__", "_abc_"))
    }
    return _named(cls.__qualname__, [cls.__bases__, contents])


def _of_module(module: ModuleType) -> tuple[Any, ...]:
    if is_library(module.__name__):
        return _named(module.__name__)
    contents = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("__") and not (isinstance(value, ModuleType) and is_library(value.__name__))
    }
    return _named(module.__name__, contents)


def _of_torch(obj: Any) -> tuple[Any, ...] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(obj, torch.nn.Module):
        tensors = [*obj.parameters(), *obj.buffers()]
        return _named("module", [(id(t), _version(t)) for t in tensors])
    if isinstance(obj, torch.Generator):
        return _named("generator", obj.get_state().numpy().tobytes())
    if not isinstance(obj, torch.Tensor):
        return None
    if obj.device.type == "cpu" and obj.numel() <= _MAX_VALUES and not obj.is_sparse and not obj.is_quantized:
        data = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _named(f"{obj.dtype} {tuple(obj.shape)}", data)
    return _named("tensor", (id(obj), _version(obj)))


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _scalars(obj: Any) -> dict[str, Any]:
    found = {k: v for k, v in getattr(obj, "__dict__", {}).items() if isinstance(v, (str, int, float, bool))}
    if hasattr(obj, "get_added_vocab"):
        found["tokens"] = len(obj)
    return found


# What Unsloth writes beside a script when it compiles a model, and code that comes with a model from the Hub.
_GENERATED = ("Unsloth", "unsloth_compiled_module_", "transformers_modules")


@functools.cache
def is_library(module: str) -> bool:
    """True for what is installed or a part of Python, False for the script and the modules in its folder."""
    root = module.partition(".")[0]
    if root == "__main__":
        return False
    if root in sys.stdlib_module_names or root in _KNOWN_LIBRARIES or root.startswith(_GENERATED):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


_DESCRIBE: dict[type, Any] = {
    FunctionType: _of_function,
    CellType: _of_cell,
    MethodType: lambda method: _named("method", [method.__self__, method.__func__]),
    ModuleType: _of_module,
}
