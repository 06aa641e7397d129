"""What of a cell rank 0 does for all: programs, magics that act on the machine, questions. Both sides of it.

Functions stand on the one shell object, over public methods of IPython.
"""

from __future__ import annotations

import builtins
import getpass
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.notebook.cell import HISTORY_MAGICS, MEASURING_MAGICS, is_rank_0_magic, parse_ranks
from unsloth_multigpu.notebook.expand import attribute, expander, expands_in
from unsloth_multigpu.notebook.value import Publisher, Receiver, like_ipython, plain_output
from unsloth_multigpu.notebook.variables import RankVariables
from unsloth_multigpu.patching import PatchRegistry

if TYPE_CHECKING:
    from unsloth_multigpu.notebook.worker import Worker


@contextmanager
def made_by_rank_0(shell: Any, publisher: Publisher, variables: RankVariables) -> Iterator[None]:
    """On the kernel: runs it and sends what it gave to the others.

    Args:
        shell: `get_ipython()`.
        publisher: Sends.
        variables: Kept from the programs that are started.
    """
    make = publisher.make
    system, getoutput = shell.system, shell.getoutput
    line_magic, cell_magic = shell.run_line_magic, shell.run_cell_magic

    def shared_system(command: str) -> Any:
        with expands_in(sys._getframe(1)), variables.without() as begin:
            return make(f"!{command}", lambda: system(begin + command), lambda _: shell.user_ns.get("_exit_code"))

    def shared_getoutput(command: str, split: bool = True, depth: int = 0) -> Any:
        with expands_in(sys._getframe(depth + 1)), variables.without() as begin:
            return make(f"x = !{command}", lambda: getoutput(begin + command, split=split), plain_output)

    def shared_line_magic(name: str, line: str, _stack_depth: int = 1) -> Any:
        refuse_history(name)
        if not is_rank_0_magic("line", name, line, _module_of(shell.find_line_magic(name))):
            return line_magic(name, line, _stack_depth=_stack_depth + 1)
        with expands_in(sys._getframe(_stack_depth)), _environment(name, variables):
            # The magic looks for the user's variables as many frames up.
            return make(
                _magic("%", name, line), lambda: line_magic(name, line, _stack_depth=_stack_depth + 4), plain_output
            )

    def shared_cell_magic(name: str, line: str, cell: str) -> Any:
        if not is_rank_0_magic("cell", name, line, _module_of(shell.find_cell_magic(name))):
            return cell_magic(name, line, cell)
        with expands_in(sys._getframe(1)), _environment(name, variables):
            return make(_magic("%%", name, line), lambda: cell_magic(name, line, cell), plain_output)

    with ExitStack() as stack:
        stack.enter_context(attribute(shell, "var_expand", expander(shell)))
        stack.enter_context(attribute(shell, "system", shared_system))
        stack.enter_context(attribute(shell, "getoutput", shared_getoutput))
        stack.enter_context(attribute(shell, "run_line_magic", shared_line_magic))
        stack.enter_context(attribute(shell, "run_cell_magic", shared_cell_magic))
        yield


class SharedInput:
    """On the kernel: what the user types is typed once.

    The kernel puts functions of its own into `builtins.input` and `getpass.getpass` for the time of each cell.

    Args:
        publisher: Sends.
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
        """At its end: leaves both as they were."""
        if self._is_open:
            self._is_open = False
            builtins.input, getpass.getpass = self._before

    # `from getpass import getpass` keeps these for later cells: they ask the function that was found last.
    def input(self, *args: Any) -> Any:
        """Stands in for `input`."""
        return self._publisher.make(_question("input", args), lambda: self._before[0](*args))

    def getpass(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for `getpass.getpass`."""
        return self._publisher.make(_question("getpass", args), lambda: self._before[1](*args, **kwargs))


def prepare_worker(worker: Worker, variables: RankVariables, kernel_shell: Mapping[str, Any]) -> None:
    """Makes the worker's shell: what rank 0 does for all is waited for.

    Args:
        worker: Gets the shell.
        variables: Kept from programs that a cell of `%%rank N` starts here.
        kernel_shell: What `describe_shell` gave.
    """
    from unsloth_multigpu.notebook.patches import VALUE_KINDS, notebook_patches
    from unsloth_multigpu.notebook.profile import make_shell, start_alike

    # Plots are drawn and shown by rank 0; of a log of one run there is one.
    os.environ.update(MPLBACKEND="agg", WANDB_MODE="disabled")
    shell = worker.shell = make_shell(kernel_shell)
    receiver = Receiver(worker)
    _wait_for_rank_0(shell, receiver, variables)
    _keep_quiet(shell, worker)

    def share(kind: str, call: Callable[[], Any]) -> Any:
        return call() if receiver.is_alone else receiver.wait_for(kind, is_value=kind.startswith(VALUE_KINDS))

    # For the life of the process.
    PatchRegistry(notebook_patches(share)).apply()

    def rank(line: str, cell: str) -> None:
        if int(os.environ["RANK"]) in read_ranks(line, int(os.environ["WORLD_SIZE"])):
            with receiver.alone(is_apart=0 not in read_ranks(line, int(os.environ["WORLD_SIZE"]))):
                shell.run_cell(cell)  # What it raises is noted as it is shown.

    shell.register_magic_function(rank, "cell", "rank")
    shell.register_magic_function(lambda _line, cell: rank("0", cell), "cell", "rank0")
    # Asked by the session: `disable_multi_gpu()` of a worker waits there, because rank 0's ends this process.
    object.__setattr__(shell, "value_of_rank_0", receiver.wait_for)
    object.__setattr__(shell, "is_apart", lambda: receiver.is_apart)
    object.__setattr__(shell, "is_replay", lambda: worker.is_replay)
    object.__setattr__(shell, "has_rank_0_left", lambda: worker.left >= worker.number > 0)
    worker.start_failures = start_alike(shell, kernel_shell)


def _wait_for_rank_0(shell: Any, receiver: Receiver, variables: RankVariables) -> None:
    wait_for = receiver.wait_for
    original = {name: getattr(shell, name) for name in ("system", "getoutput", "run_line_magic", "run_cell_magic")}
    ask, ask_secret = builtins.input, getpass.getpass

    def system(command: str) -> None:
        if receiver.is_alone:
            with expands_in(sys._getframe(1)), variables.without():
                original["system"](command)
            return
        exit_code = wait_for(f"!{command}", is_value=False)
        if exit_code is not None:
            shell.user_ns["_exit_code"] = exit_code

    def getoutput(command: str, split: bool = True, depth: int = 0) -> Any:
        if receiver.is_alone:
            with expands_in(sys._getframe(depth + 1)), variables.without():
                return original["getoutput"](command, split=split)
        return like_ipython(wait_for(f"x = !{command}"))

    def run_line_magic(name: str, line: str, _stack_depth: int = 1) -> Any:
        refuse_history(name)
        if is_rank_0_magic("line", name, line, _module_of(shell.find_line_magic(name))) and not receiver.is_alone:
            return like_ipython(wait_for(_magic("%", name, line), is_value=False))
        return original["run_line_magic"](name, line, _stack_depth=_stack_depth + 1)

    def run_cell_magic(name: str, line: str, cell: str) -> Any:
        if is_rank_0_magic("cell", name, line, _module_of(shell.find_cell_magic(name))) and not receiver.is_alone:
            return like_ipython(wait_for(_magic("%%", name, line), is_value=False))
        with variables.without() if receiver.is_alone else nullcontext():
            return original["run_cell_magic"](name, line, cell)

    for function in (expander(shell), system, getoutput, run_line_magic, run_cell_magic):
        object.__setattr__(shell, function.__name__, function)
    builtins.input = lambda *args: ask(*args) if receiver.is_alone else wait_for(_question("input", args))
    getpass.getpass = lambda *a, **k: ask_secret(*a, **k) if receiver.is_alone else wait_for(_question("getpass", a))


def _keep_quiet(shell: Any, worker: Worker) -> None:
    """Nobody sits before a worker: nothing is paged, drawn or debugged, and it ends with the kernel."""

    from unsloth_multigpu.notebook.worker import ReplayedLineError

    codes = {getattr(type(shell), name).__code__ for name in ("run_cell", "run_line_magic", "run_cell_magic")}

    def showtraceback(_shell: Any, exc_tuple: Any = None, *_args: Any, **_kwargs: Any) -> None:
        # IPython keeps to itself the error of a cell within a magic (%%capture, %%time) or a cell. What is shown
        # elsewhere did not end anything: a failed `_repr_html_`, an error that the cell has caught.
        frames = (frame.f_code in codes for frame, _ in traceback.walk_stack(None))
        if exc_tuple is None and sum(frames) > 1:
            worker.shown_error = sys.exc_info()[1]
        if isinstance(sys.exc_info()[1], ReplayedLineError):
            sys.stdout.write("Rank 0 has left this cell here.\n")
            return
        traceback.print_exc()  # IPython's own takes seconds on a deep stack, and the kernel shows it.

    def show_in_pager(_shell: Any, text: Any, *_args: Any, **_kwargs: Any) -> None:
        sys.stdout.write(f"{text.get('text/plain', '') if isinstance(text, dict) else text}\n")

    def leave(keep_kernel: bool = False) -> None:
        pass

    def close_figures() -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close("all")  # As the front end does with those it has shown.

    shell.set_hook("show_in_pager", show_in_pager)
    shell.events.register("post_execute", close_figures)
    for name in ("showtraceback", "showsyntaxerror", "showindentationerror"):
        object.__setattr__(shell, name, MethodType(showtraceback, shell))
    object.__setattr__(shell, "enable_matplotlib", lambda gui=None: (gui, "agg"))
    object.__setattr__(shell, "enable_gui", lambda gui=None: None)
    object.__setattr__(shell, "ask_exit", leave)
    shell.user_ns.update(exit=leave, quit=leave)
    sys.breakpointhook = lambda *_args, **_kwargs: None


def read_ranks(line: str, num_ranks: int) -> frozenset[int]:
    """`parse_ranks` for what a user wrote behind %%rank."""
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


def _question(name: str, args: tuple[Any, ...]) -> str:
    return f"{name}({str(args[0])!r})" if args else f"{name}()"


def _magic(signs: str, name: str, line: str) -> str:
    return f"{signs}{name} {line}".rstrip()


def _environment(name: str, variables: RankVariables) -> Any:
    return nullcontext() if name in MEASURING_MAGICS else variables.without()


def _module_of(magic: Any) -> str | None:
    if magic is None:
        return None
    return str(getattr(magic, "__module__", ""))
