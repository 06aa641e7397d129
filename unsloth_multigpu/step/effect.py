"""Has a call of a mapped function changed what the function reaches? Digests of that state, as dill pickles it.

A mapped function may count words or number labels besides returning rows. The ranks that read the first one's result
from its cache would have none of that.

Needs no torch.
"""

from __future__ import annotations

import hashlib
import pickle
import time
import warnings
from typing import Any

from unsloth_multigpu.step.library import LIBRARIES

# Beyond these the state is not looked at, and every rank calls the function itself.
_MAX_BYTES = 256 << 20
_MAX_S = 5.0
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
    """A digest of what functions and other objects reach; None where that is too much to look at, or cannot be pickled.

    As in the hash by which `datasets` finds its cache, functions of the script are followed into closures, defaults and
    the global variables that they use; functions of other modules count by their names.
    """
    import dill  # Comes with datasets.

    class Pickler(dill.Pickler):
        def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
            is_known = type(obj).__module__.partition(".")[0] in LIBRARIES
            super().save(_in_short(obj) if is_known else obj, *args, **kwargs)

    file = _Digest()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Pickler(file, recurse=True).dump(roots)
    except _NOT_PICKLED:
        return None
    return file.digest.hexdigest()


def _in_short(obj: Any) -> tuple[Any, ...]:
    """What counts of an object of a library: a tokenizer's truncation, say, changes while it works."""
    if hasattr(obj, "data_ptr") and hasattr(obj, "is_inference"):  # A tensor; torch counts what is written to it.
        return id(obj), 0 if obj.is_inference() else obj._version
    if type(obj).__name__ == "Generator" and hasattr(obj, "get_state"):
        return ("generator", obj.get_state().numpy().tobytes())
    values = {k: v for k, v in getattr(obj, "__dict__", {}).items() if isinstance(v, (str, int, float, bool))}
    num_tokens = len(obj) if hasattr(obj, "get_added_vocab") else 0
    return getattr(obj, "__qualname__", type(obj).__qualname__), values, num_tokens


class _Digest:
    """A file that keeps a digest of what is written, up to the limits."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        self._num_bytes = 0
        self._deadline_s = time.monotonic() + _MAX_S

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._num_bytes += size
        if self._num_bytes > _MAX_BYTES or time.monotonic() > self._deadline_s:
            raise OSError("There is more state than is looked at.")
        self.digest.update(data)
        return size
