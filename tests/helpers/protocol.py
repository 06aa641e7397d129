"""What a protocol of `unsloth_multigpu.trainer_protocol` asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def methods(protocol: type) -> dict[str, Callable[..., Any]]:
    """Its methods, those of its bases included."""
    found = {n: v for base in reversed(protocol.__mro__) for n, v in vars(base).items() if inspect.isfunction(v)}
    # `typing` adds its own `__init__` and one more.
    return {name: method for name, method in found.items() if method.__module__ == protocol.__module__}


def members(protocol: type) -> set[str]:
    """Its attributes and methods, those of its bases included."""
    return {*get_type_hints(protocol), *methods(protocol)}
