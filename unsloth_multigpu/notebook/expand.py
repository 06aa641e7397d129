"""The frame in which commands of a cell find their variables, although functions of this package are in between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of one object temporarily."""
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


class UserFrame:
    """The frame of the user's code that runs a command. IPython counts frames up to it, and this package adds frames.

    Each thread has its own: subshells run commands as well.
    """

    def __init__(self) -> None:
        self._frame: ContextVar[FrameType | None] = ContextVar("user_frame", default=None)

    @contextmanager
    def at(self, frame: FrameType) -> Iterator[None]:
        """Inside, `{name}` and `$name` of commands are looked up in this frame."""
        token = self._frame.set(frame)
        try:
            yield
        finally:
            self._frame.reset(token)

    def depth(self, depth: int) -> int:
        """The `depth` for `var_expand` of IPython, for the function that replaces it and calls this.

        Args:
            depth: What that function was given.
        """
        frame, above = self._frame.get(), sys._getframe(1)
        if frame is None:
            return depth + 1
        depth = 0
        while above is not frame and above.f_back is not None:
            depth, above = depth + 1, above.f_back
        return depth
