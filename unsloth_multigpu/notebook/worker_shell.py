"""The IPython shell of a worker. Rank 0 runs commands and magics for it, and its output goes to a log."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from unsloth_multigpu.notebook.cell_program import ReplayedLineError, WorkerProgram
from unsloth_multigpu.notebook.kernel_share import read_ranks
from unsloth_multigpu.notebook.value import Receiver

_IPythonShell: Any = object


class WorkerShell(_IPythonShell):  # type: ignore[misc, unused-ignore]
    """Overrides methods of IPython's shell. `make_worker_shell` adds IPython's class as the next base.

    A subclass, so that no attribute has to be set on an object of another library.

    Args:
        receiver: Waits for rank 0.
        program: The program of this process; `find_worker_program` finds it here.
        options: Arguments of IPython's class.

    Attributes:
        multi_gpu_program: `program`.
        shown_error: Last error shown by the shell that the result of the cell does not have.
    """

    multi_gpu_program: WorkerProgram
    shown_error: BaseException | None
    _receiver: Receiver

    def __init__(self, receiver: Receiver, program: WorkerProgram, **options: Any) -> None:
        self._receiver = receiver
        self.multi_gpu_program = program
        self.shown_error = None
        super().__init__(**options)
        self.set_hook("show_in_pager", _print_page)
        self.events.register("post_execute", _close_figures)
        self.register_magic_function(self._rank, "cell", "rank")
        self.register_magic_function(lambda _line, cell: self._rank("0", cell), "cell", "rank0")
        self.user_ns.update(exit=_stay, quit=_stay)

    def _rank(self, line: str, cell: str) -> None:
        ranks = read_ranks(line, int(os.environ["WORLD_SIZE"]))
        if int(os.environ["RANK"]) in ranks:
            with self._receiver.detached(is_apart=0 not in ranks):
                self.run_cell(cell)  # `showtraceback` records its error.

    def showtraceback(self, exc_tuple: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Writes an error to the log, and records one that IPython does not return."""
        # IPython does not return the error of a cell that runs inside a magic (%%capture, %%time) or another cell.
        # Errors shown elsewhere did not end the cell: a `_repr_html_` that failed, an error that the cell has caught.
        of_ipython = super()
        codes = {getattr(of_ipython, name).__code__ for name in ("run_cell", "run_line_magic", "run_cell_magic")}
        num_inside = sum(frame.f_code in codes for frame, _ in traceback.walk_stack(None))
        if exc_tuple is None and num_inside > 1:
            self.shown_error = sys.exc_info()[1]
        if isinstance(sys.exc_info()[1], ReplayedLineError):
            sys.stdout.write("Rank 0 has left this cell here.\n")
            return
        traceback.print_exc()  # IPython's takes seconds for a deep stack. The kernel shows the error to the user.

    showsyntaxerror = showindentationerror = showtraceback

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str | None, str]:
        """Selects "agg", because rank 0 draws and shows plots."""
        return gui, "agg"

    def enable_gui(self, gui: str | None = None) -> None:
        """Does nothing: there is no window."""

    def ask_exit(self) -> None:
        """Does nothing: a worker ends with the kernel."""


def make_worker_shell(profile: str, receiver: Receiver, program: WorkerProgram) -> WorkerShell:
    """Creates the shell of this process.

    Args:
        profile: Folder of the kernel's profile, which has the values of `%store`.
        receiver: See `WorkerShell`.
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
        """Its name is in no configuration file, so none applies to it."""

    shell: WorkerShell = Shell.instance(receiver, program, user_module=sys.modules["__main__"], **options)
    shell.run_cell("%load_ext storemagic", store_history=False)  # As every IPython application does.
    return shell


def _print_page(_shell: Any, text: Any, *_args: Any, **_kwargs: Any) -> None:
    sys.stdout.write(f"{text.get('text/plain', '') if isinstance(text, dict) else text}\n")


def _close_figures() -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")  # The front end does so with the figures that it has shown.


def _stay(keep_kernel: bool = False) -> None:
    """Replaces `exit` and `quit`."""
