"""How rank 0's work for all ranks ended, as the others are told: by an error that a script catches as on one GPU.

Needs no torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from unsloth_multigpu.errors import DistributedError

# What a script asks an error of the system, or of a program, for.
_FIELDS = ("errno", "strerror", "filename", "returncode")


def failure(error: BaseException) -> dict[str, Any]:
    """What the other ranks are told of an error of rank 0, as JSON."""
    kinds = [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__ if issubclass(kind, Exception)]
    fields = {name: getattr(error, name, None) for name in _FIELDS}
    known = {name: value for name, value in fields.items() if isinstance(value, (int, str))}
    return {"error": f"{type(error).__name__}: {error}", "kinds": kinds, "fields": known}


def error_of(outcome: Mapping[str, Any], what: str) -> DistributedError:
    """The error of a rank that waited for rank 0 in `what`.

    It is of rank 0's class as well, or of the nearest base that this process knows and can add, so that
    `except OSError` takes the same way on all ranks.
    """
    message, hint = f"rank 0 failed in {what}: {outcome['error']}", "The cause is rank 0's error."
    for module, name in outcome.get("kinds", ()):
        kind = _find(module, name)
        error = None if kind is None else _built(kind, message, hint)
        if error is not None:
            error.of_rank_0 = outcome["error"]
            fields = outcome.get("fields", {})
            for field in (name for name in _FIELDS if name in fields):
                setattr(error, field, fields[field])
            return error
    return DistributedError(message, hint=hint)


def _find(module: str, name: str) -> type[Exception] | None:
    """A class of a module that is imported already. The name comes from another process: nothing is imported for it."""
    owner: Any = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr: a module may import others when it is asked for what it lacks.
        owner = getattr(owner, "__dict__", {}).get(part)
    return owner if isinstance(owner, type) and issubclass(owner, Exception) else None


def _built(kind: type[Exception], message: str, hint: str) -> DistributedError | None:
    """None for a class that cannot be combined with ours, or that needs arguments of its own."""
    bases = (kind,) if issubclass(kind, DistributedError) else (DistributedError, kind)
    if issubclass(DistributedError, kind):
        bases = (DistributedError,)
    # The name is ours: it says in a report that the cause is elsewhere.
    members = {"__module__": DistributedError.__module__, "__reduce__": _reduced}
    try:
        error: DistributedError = type("DistributedError", bases, members)(message, hint=hint)
    except (TypeError, AttributeError):
        return None
    return error


def _reduced(error: DistributedError) -> tuple[Any, ...]:
    """For another process: it can make the class again, but not by its name."""
    return functools.partial(DistributedError, hint=error.hint), error.args
