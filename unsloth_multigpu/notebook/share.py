"""What rank 0 does for all ranks: programs, magics that act on the machine, questions. The other side: `worker_shell`.

On the kernel, attributes of the one shell object replace public methods of IPython while the ranks live.
"""

from __future__ import annotations

import builtins
import getpass
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from unsloth_multigpu.notebook.cell import HISTORY_MAGICS, MEASURING_MAGICS, is_rank_0_magic, parse_ranks
from unsloth_multigpu.notebook.expand import UserFrame, attribute
from unsloth_multigpu.notebook.value import Publisher, plain_output
from unsloth_multigpu.notebook.variables import RankVariables


@contextmanager
def made_by_rank_0(shell: Any, publisher: Publisher, variables: RankVariables) -> Iterator[None]:
    """On the kernel: does these things and sends their results to the other ranks.

    Args:
        shell: `get_ipython()`.
        publisher: Sends the results.
        variables: Hidden from the programs that are started.
    """
    make, user = publisher.make, UserFrame()
    expand, system, getoutput = type(shell).var_expand, shell.system, shell.getoutput
    line_magic, cell_magic = shell.run_line_magic, shell.run_cell_magic

    def var_expand(cmd: str, depth: int = 0, *args: Any, **kwargs: Any) -> Any:
        return expand(shell, cmd, user.depth(depth), *args, **kwargs)

    def shared_system(command: str) -> Any:
        with user.at(sys._getframe(1)), variables.without() as begin:
            return make(f"!{command}", lambda: system(begin + command), lambda _: shell.user_ns.get("_exit_code"))

    def shared_getoutput(command: str, split: bool = True, depth: int = 0) -> Any:
        with user.at(sys._getframe(depth + 1)), variables.without() as begin:
            return make(f"x = !{command}", lambda: getoutput(begin + command, split=split), plain_output)

    def shared_line_magic(name: str, line: str, _stack_depth: int = 1) -> Any:
        refuse_history(name)
        if not is_rank_0_magic("line", name, line, module_of(shell.find_line_magic(name))):
            return line_magic(name, line, _stack_depth=_stack_depth + 1)
        with user.at(sys._getframe(_stack_depth)), _environment(name, variables):
            # The magic looks for the user's variables this many frames up.
            return make(
                magic_text("%", name, line), lambda: line_magic(name, line, _stack_depth=_stack_depth + 4), plain_output
            )

    def shared_cell_magic(name: str, line: str, cell: str) -> Any:
        if not is_rank_0_magic("cell", name, line, module_of(shell.find_cell_magic(name))):
            return cell_magic(name, line, cell)
        with user.at(sys._getframe(1)), _environment(name, variables):
            return make(magic_text("%%", name, line), lambda: cell_magic(name, line, cell), plain_output)

    with ExitStack() as stack:
        stack.enter_context(attribute(shell, "var_expand", var_expand))
        stack.enter_context(attribute(shell, "system", shared_system))
        stack.enter_context(attribute(shell, "getoutput", shared_getoutput))
        stack.enter_context(attribute(shell, "run_line_magic", shared_line_magic))
        stack.enter_context(attribute(shell, "run_cell_magic", shared_cell_magic))
        yield


class SharedInput:
    """On the kernel: what the user types is typed once.

    The kernel puts functions of its own into `builtins.input` and `getpass.getpass` for the time of each cell.

    Args:
        publisher: Sends what was typed.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._before: tuple[Callable[..., str], Callable[..., str]] = (builtins.input, getpass.getpass)
        self._is_open = False

    def open(self) -> None:
        """At the begin of a cell."""
        if not self._is_open:
            self._is_open = True
            self._before = (builtins.input, getpass.getpass)
            builtins.input, getpass.getpass = self.input, self.getpass

    def close(self) -> None:
        """At its end: restores both."""
        if self._is_open:
            self._is_open = False
            builtins.input, getpass.getpass = self._before

    # `from getpass import getpass` keeps these for later cells: they call the original that was found last.
    def input(self, *args: Any) -> Any:
        """Replaces `input`."""
        return self._publisher.make(question_text("input", args), lambda: self._before[0](*args))

    def getpass(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces `getpass.getpass`."""
        return self._publisher.make(question_text("getpass", args), lambda: self._before[1](*args, **kwargs))


def read_ranks(line: str, num_ranks: int) -> frozenset[int]:
    """`parse_ranks` for what a user wrote after %%rank."""
    from IPython.core.error import UsageError

    try:
        return parse_ranks(line, num_ranks)
    except ValueError as error:
        raise UsageError(f"%%rank: {error}") from None


def refuse_history(name: str) -> None:
    """Raises for a magic that would run other code on each rank."""
    from IPython.core.error import UsageError

    if name in HISTORY_MAGICS:
        raise UsageError(f"%{name} reads the history, which only rank 0 has: copy the cell.")


def question_text(name: str, args: tuple[Any, ...]) -> str:
    """The text by which ranks identify a question."""
    return f"{name}({str(args[0])!r})" if args else f"{name}()"


def magic_text(signs: str, name: str, line: str) -> str:
    """The text by which ranks identify a magic."""
    return f"{signs}{name} {line}".rstrip()


def _environment(name: str, variables: RankVariables) -> Any:
    return nullcontext() if name in MEASURING_MAGICS else variables.without()


def module_of(magic: Any) -> str | None:
    """Where a magic is defined; None for one that this shell does not have."""
    if magic is None:
        return None
    return str(getattr(magic, "__module__", ""))
