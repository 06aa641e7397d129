"""Where commands of a cell look up their variables, although functions of ours are between them and the cell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

# Each thread has its own: subshells run commands as well.
_user_frame: ContextVar[FrameType | None] = ContextVar("user_frame", default=None)


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts an attribute on one object for a time."""
    is_own = name in vars(owner)
    before = vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)


@contextmanager
def expands_in(frame: FrameType) -> Iterator[None]:
    """For a time `{name}` and `$name` of commands are looked up in a frame of the user's code."""
    token = _user_frame.set(frame)
    try:
        yield
    finally:
        _user_frame.reset(token)


def depth_of_user(depth: int) -> int:
    """For the caller, which stands in for `var_expand` of a shell: the `depth` that it gives to IPython's.

    IPython counts frames up to the code of the user, and functions of ours are in between.

    Args:
        depth: What the caller was given.
    """
    frame, above = _user_frame.get(), sys._getframe(1)
    if frame is None:
        return depth + 1
    depth = 0
    while above is not frame and above.f_back is not None:
        depth, above = depth + 1, above.f_back
    return depth


def expander(shell: Any) -> Callable[..., Any]:
    """What stands in for `var_expand` of a shell."""
    expand = type(shell).var_expand

    def var_expand(cmd: str, depth: int = 0, *args: Any, **kwargs: Any) -> Any:
        return expand(shell, cmd, depth_of_user(depth), *args, **kwargs)

    return var_expand
