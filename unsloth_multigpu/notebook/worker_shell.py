"""The IPython shell of a worker: it waits for what rank 0 does for all ranks, and its output goes to the log."""

from __future__ import annotations

import builtins
import getpass
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from unsloth_multigpu.notebook.cell import is_rank_0_magic
from unsloth_multigpu.notebook.expand import UserFrame
from unsloth_multigpu.notebook.program import ReplayedLineError, WorkerProgram
from unsloth_multigpu.notebook.share import magic_text, module_of, question_text, read_ranks, refuse_history
from unsloth_multigpu.notebook.value import Receiver, like_ipython
from unsloth_multigpu.notebook.variables import RankVariables
from unsloth_multigpu.patching import PatchRegistry

_IPythonShell: Any = object


class WorkerShell(_IPythonShell):  # type: ignore[misc, unused-ignore]
    """IPython's shell with other methods. `make_worker_shell` adds IPython's class as the next base.

    It is a class of this package, so no attribute has to be set on a shell of another library.

    Args:
        receiver: Waits for rank 0.
        variables: Hidden from the programs that a cell of `%%rank N` starts here.
        program: What the session of this process is told; `find_worker_program` reads it.
        options: Arguments of IPython's class.

    Attributes:
        multi_gpu_program: `program`.
        shown_error: The error that the shell has shown last in a cell whose result does not have it.
    """

    multi_gpu_program: WorkerProgram
    shown_error: BaseException | None
    _receiver: Receiver
    _variables: RankVariables
    _user: UserFrame

    def __init__(self, receiver: Receiver, variables: RankVariables, program: WorkerProgram, **options: Any) -> None:
        self._receiver = receiver
        self._variables = variables
        self._user = UserFrame()
        self.multi_gpu_program = program
        self.shown_error = None
        super().__init__(**options)
        self.set_hook("show_in_pager", _print_page)
        self.events.register("post_execute", _close_figures)
        self.register_magic_function(self._rank, "cell", "rank")
        self.register_magic_function(lambda _line, cell: self._rank("0", cell), "cell", "rank0")
        self.user_ns.update(exit=_stay, quit=_stay)

    def var_expand(self, cmd: str, depth: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Looks up variables in the code of the user: functions of this package are in between."""
        return super().var_expand(cmd, self._user.depth(depth), *args, **kwargs)

    def system(self, command: str) -> None:
        """`!command`: rank 0 runs it."""
        if self._receiver.is_detached:
            with self._user.at(sys._getframe(1)), self._variables.without():
                super().system(command)
            return
        exit_code = self._receiver.wait_for(f"!{command}", is_value=False)
        if exit_code is not None:
            self.user_ns["_exit_code"] = exit_code

    def getoutput(self, command: str, split: bool = True, depth: int = 0) -> Any:
        """`x = !command`: rank 0 runs it."""
        if self._receiver.is_detached:
            with self._user.at(sys._getframe(depth + 1)), self._variables.without():
                return super().getoutput(command, split=split)
        return like_ipython(self._receiver.wait_for(f"x = !{command}"))

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> Any:
        """Waits for a magic that rank 0 runs alone; runs any other."""
        refuse_history(name)
        is_detached = self._receiver.is_detached
        if is_rank_0_magic("line", name, line, module_of(self.find_line_magic(name))) and not is_detached:
            return like_ipython(self._receiver.wait_for(magic_text("%", name, line), is_value=False))
        return super().run_line_magic(name, line, _stack_depth=_stack_depth + 1)

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        """Waits for a magic that rank 0 runs alone; runs any other."""
        is_detached = self._receiver.is_detached
        if is_rank_0_magic("cell", name, line, module_of(self.find_cell_magic(name))) and not is_detached:
            return like_ipython(self._receiver.wait_for(magic_text("%%", name, line), is_value=False))
        with self._variables.without() if is_detached else nullcontext():
            return super().run_cell_magic(name, line, cell)

    def _rank(self, line: str, cell: str) -> None:
        ranks = read_ranks(line, int(os.environ["WORLD_SIZE"]))
        if int(os.environ["RANK"]) in ranks:
            with self._receiver.detached(is_apart=0 not in ranks):
                self.run_cell(cell)  # `showtraceback` notes what it raises.

    def showtraceback(self, exc_tuple: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Writes an error into the log, and records one that IPython does not return."""
        # IPython does not return the error of a cell that runs inside a magic (%%capture, %%time) or another cell. What
        # is shown elsewhere has ended nothing: a `_repr_html_` that failed, an error that the cell has caught.
        of_ipython = super()
        codes = {getattr(of_ipython, name).__code__ for name in ("run_cell", "run_line_magic", "run_cell_magic")}
        num_inside = sum(frame.f_code in codes for frame, _ in traceback.walk_stack(None))
        if exc_tuple is None and num_inside > 1:
            self.shown_error = sys.exc_info()[1]
        if isinstance(sys.exc_info()[1], ReplayedLineError):
            sys.stdout.write("Rank 0 has left this cell here.\n")
            return
        traceback.print_exc()  # IPython's own takes seconds on a deep stack. The kernel shows the error to the user.

    showsyntaxerror = showindentationerror = showtraceback

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str | None, str]:
        """Plots are drawn and shown by rank 0."""
        return gui, "agg"

    def enable_gui(self, gui: str | None = None) -> None:
        """There is no window."""

    def ask_exit(self) -> None:
        """A worker ends with the kernel."""


def make_worker_shell(
    profile: str, receiver: Receiver, variables: RankVariables, program: WorkerProgram
) -> WorkerShell:
    """Makes the shell of this process.

    Args:
        profile: The folder of the kernel's profile, where `%store` keeps values.
        receiver: See `WorkerShell`.
        variables: See `WorkerShell`.
        program: See `WorkerShell`.
    """
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.profiledir import ProfileDir
    from traitlets.config import Config

    settings = Config()
    settings.HistoryManager.enabled = False
    # IPython keeps each traceback as text; other modes take seconds for one traceback.
    settings.InteractiveShell.xmode = "Minimal"
    options = {"config": settings, "profile_dir": ProfileDir.find_profile_dir(profile)}

    class Shell(WorkerShell, InteractiveShell):  # type: ignore[misc, unused-ignore]
        """Has its own name, so that no section of a configuration file applies to it."""

    shell: WorkerShell = Shell.instance(receiver, variables, program, user_module=sys.modules["__main__"], **options)
    return shell


def share_calls(receiver: Receiver) -> None:
    """Lets functions that ask the user or the front end wait for rank 0. For the life of the process.

    Args:
        receiver: Waits for rank 0.
    """
    from unsloth_multigpu.notebook.patches import VALUE_KINDS, notebook_patches

    def share(kind: str, call: Callable[[], Any]) -> Any:
        return call() if receiver.is_detached else receiver.wait_for(kind, is_value=kind.startswith(VALUE_KINDS))

    PatchRegistry(notebook_patches(share)).apply()


def share_questions(receiver: Receiver) -> None:
    """Lets `input` and `getpass` wait for what the user has answered on rank 0. For the life of the process.

    Args:
        receiver: Waits for rank 0.
    """
    ask, ask_secret = builtins.input, getpass.getpass

    def shared_input(*args: Any) -> Any:
        return ask(*args) if receiver.is_detached else receiver.wait_for(question_text("input", args))

    def shared_getpass(*args: Any, **kwargs: Any) -> Any:
        if receiver.is_detached:
            return ask_secret(*args, **kwargs)
        return receiver.wait_for(question_text("getpass", args))

    builtins.input, getpass.getpass = shared_input, shared_getpass
    sys.breakpointhook = lambda *_args, **_kwargs: None


def _print_page(_shell: Any, text: Any, *_args: Any, **_kwargs: Any) -> None:
    sys.stdout.write(f"{text.get('text/plain', '') if isinstance(text, dict) else text}\n")


def _close_figures() -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")  # As the front end does with those that it has shown.


def _stay(keep_kernel: bool = False) -> None:
    """Replaces `exit` and `quit`."""
