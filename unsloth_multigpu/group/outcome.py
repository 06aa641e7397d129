"""Passes an error of rank 0 to the other ranks, where the script can catch it as on one GPU.

Needs no torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from unsloth_multigpu.errors import DistributedError

# Attributes of errors that scripts read, and the exit code of ours.
_FIELDS = {"errno", "strerror", "filename", "returncode", "exit_code"}


def failure(error: BaseException) -> dict[str, Any]:
    """Describes an error of rank 0 for the other ranks, as JSON values."""
    kinds = [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__ if issubclass(kind, Exception)]
    fields = {name: getattr(error, name, None) for name in _FIELDS}
    known = {name: value for name, value in fields.items() if isinstance(value, (int, str))}
    return {"error": f"{type(error).__name__}: {error}", "kinds": kinds, "fields": known}


def value_of(outcome: Mapping[str, Any], what: str) -> Any:
    """Returns the value that rank 0 has published as the outcome of `what`, or raises the error; see `error_of`."""
    if "error" in outcome:
        raise error_of(outcome, what)
    return outcome["value"]


def error_of(outcome: Mapping[str, Any], what: str) -> DistributedError:
    """Returns the error for a rank that has waited for rank 0 in `what`.

    It also derives from the class of rank 0's error, or from the nearest base that this process has imported, so that
    `except OSError` catches it on all ranks.
    """
    message, hint = f"rank 0 failed in {what}: {outcome['error']}", "The cause is rank 0's error."
    for kind in filter(None, (_find(*name) for name in outcome.get("kinds", ()))):
        ours = (DistributedError,) if issubclass(DistributedError, kind) else (DistributedError, kind)
        bases = (kind,) if issubclass(kind, DistributedError) else ours
        # If a class cannot be combined with ours, or needs other arguments, its base class is tried next.
        with suppress(TypeError, AttributeError):
            # It has our name, because the cause is on another rank.
            members = {"__module__": DistributedError.__module__, "__reduce__": _reduced}
            made = type("DistributedError", bases, members)
            error: DistributedError = made(message, hint=hint)
            error.of_rank_0 = outcome["error"]
            fields = outcome.get("fields", {})
            for field in fields.keys() & _FIELDS:
                setattr(error, field, fields[field])
            return error
    return DistributedError(message, hint=hint)


def _reduced(error: DistributedError) -> tuple[Any, ...]:
    """Pickles the error as a plain DistributedError: its own class cannot be found by its name."""
    return functools.partial(DistributedError, hint=error.hint), error.args


def _find(module: str, name: str) -> type[Exception] | None:
    """Returns a class of an imported module, else None. The name comes from another process, so nothing is imported."""
    owner: Any = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr, by which a lazy module may import others.
        owner = getattr(owner, "__dict__", {}).get(part)
    return owner if isinstance(owner, type) and issubclass(owner, Exception) else None
