"""Runs commands, magics and logins on rank 0 for all ranks. Used by the kernel and by workers.

Public methods of IPython are replaced on the one shell object while the ranks live.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any

from unsloth_multigpu.notebook.cell import HISTORY_MAGICS, MEASURING_MAGICS, VALUE_MAGICS, is_rank_0_magic
from unsloth_multigpu.notebook.value import Publisher, Receiver, like_ipython
from unsloth_multigpu.notebook.variables import RankVariables
from unsloth_multigpu.patching import Patch
from unsloth_multigpu.seam import instance_attribute

_LOGINS = (
    "huggingface_hub._login:login",
    "huggingface_hub._login:logout",
    "huggingface_hub._login:notebook_login",
    "huggingface_hub._login:interpreter_login",
)
_HUB = "huggingface_hub>=0.24"
_ASKS = "Asks the user only on rank 0; the other ranks read the token from its file."


@contextmanager
def done_by_rank_0(shell: Any, sharer: Publisher | Receiver, variables: RankVariables) -> Iterator[None]:
    """Within the context, the shell runs commands and magics on rank 0 only, and the other ranks get the results.

    `sharer` sends the results on rank 0, and waits for them on other ranks. `variables` are hidden from the programs
    that are started.
    """
    from IPython.core.error import UsageError

    make, user = sharer.make, _UserFrame()
    expand, system, getoutput = type(shell).var_expand, shell.system, shell.getoutput
    line_magic, cell_magic = shell.run_line_magic, shell.run_cell_magic

    def var_expand(cmd: str, depth: int = 0, *args: Any, **kwargs: Any) -> Any:
        return expand(shell, cmd, user.depth(depth), *args, **kwargs)

    def shared_system(command: str) -> None:
        def run() -> Any:
            system(command)
            return shell.user_ns.get("_exit_code")

        with user.at(sys._getframe(1)), variables.without():
            exit_code = make(f"!{command}", run, is_value=False)
        if exit_code is not None:
            shell.user_ns["_exit_code"] = exit_code

    def shared_getoutput(command: str, split: bool = True, depth: int = 0) -> Any:
        with user.at(sys._getframe(depth + 1)), variables.without():
            return like_ipython(make(f"x = !{command}", lambda: getoutput(command, split=split)))

    def shared_line_magic(name: str, line: str, _stack_depth: int = 1) -> Any:
        if name in HISTORY_MAGICS:
            raise UsageError(f"%{name} reads the history, which only rank 0 has: copy the cell.")
        if not is_rank_0_magic("line", name, line, _module_of(shell.find_line_magic(name))):
            return line_magic(name, line, _stack_depth=_stack_depth + 1)

        def run() -> Any:
            return line_magic(name, line, _stack_depth=user.depth(0) + 1)

        with user.at(sys._getframe(_stack_depth)), _environment(name, variables):
            return like_ipython(make(f"%{name} {line}".rstrip(), run, is_value=name in VALUE_MAGICS))

    def shared_cell_magic(name: str, line: str, cell: str) -> Any:
        def run() -> Any:
            return cell_magic(name, line, cell)

        if not is_rank_0_magic("cell", name, line, _module_of(shell.find_cell_magic(name))):
            return run()
        with user.at(sys._getframe(1)), _environment(name, variables):
            return like_ipython(make(f"%%{name} {line}".rstrip(), run, is_value=False))

    replacements = {
        "var_expand": var_expand,
        "system": shared_system,
        "getoutput": shared_getoutput,
        "run_line_magic": shared_line_magic,
        "run_cell_magic": shared_cell_magic,
    }
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(instance_attribute(shell, name, replacement))
        yield


def notebook_patches(make: Callable[..., Any]) -> list[Patch]:
    """Returns the patches of functions that ask the user. `make` is `Publisher.make` or `Receiver.make`."""
    return [
        Patch(target, _HUB, functools.partial(_once, make, target.rpartition(":")[2]), _ASKS, optional=True)
        for target in _LOGINS
    ]


def _once(make: Callable[..., Any], name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # Without the arguments: a token that is given to `login` is not sent to other ranks.
    return make(f"{name}()", lambda: original(*args, **kwargs), is_value=False)


def read_ranks(text: str, num_ranks: int) -> frozenset[int]:
    """Parses the ranks after %%rank: "0", "0,2" or "all"."""
    from IPython.core.error import UsageError

    if text.strip() == "all":
        return frozenset(range(num_ranks))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < num_ranks for part in parts):
        raise UsageError(f"%%rank: {text.strip()!r}; expected 0 .. {num_ranks - 1}, a list such as 0,1, or all.")
    return frozenset(map(int, parts))


def _environment(name: str, variables: RankVariables) -> Any:
    return nullcontext() if name in MEASURING_MAGICS else variables.without()


def _module_of(magic: Any) -> str | None:
    """Returns the module that defines a magic; None if this shell does not have the magic."""
    if magic is None:
        return None
    return str(getattr(magic, "__module__", ""))


class _UserFrame:
    """The frame of the user's code that runs a command. IPython counts frames up to it, and this module adds frames.

    Each thread has its own, because subshells run commands, too.
    """

    def __init__(self) -> None:
        self._frame: ContextVar[FrameType | None] = ContextVar("user_frame", default=None)

    @contextmanager
    def at(self, frame: FrameType) -> Iterator[None]:
        """Within the context, `{name}` and `$name` in commands are looked up in this frame."""
        token = self._frame.set(frame)
        try:
            yield
        finally:
            self._frame.reset(token)

    def depth(self, depth: int) -> int:
        """Returns the `depth` for IPython's `var_expand`, given that of its replacement, which calls this."""
        frame, above = self._frame.get(), sys._getframe(1)
        if frame is None:
            return depth + 1
        depth = 0
        while above is not frame and above.f_back is not None:
            depth, above = depth + 1, above.f_back
        return depth
