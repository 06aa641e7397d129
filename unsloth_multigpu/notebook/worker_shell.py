"""The IPython shell of a worker: it waits for what rank 0 does for all ranks, and its output goes to the log."""

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
    """IPython's shell with other methods. `make_worker_shell` adds IPython's class as the next base.

    It is a class of this package, so no attribute has to be set on a shell of another library.

    Args:
        receiver: Waits for rank 0.
        program: What the session of this process is told; `find_worker_program` reads it.
        options: Arguments of IPython's class.

    Attributes:
        multi_gpu_program: `program`.
        shown_error: The error that the shell has shown last in a cell whose result does not have it.
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


def make_worker_shell(profile: str, receiver: Receiver, program: WorkerProgram) -> WorkerShell:
    """Makes the shell of this process.

    Args:
        profile: The folder of the kernel's profile, where `%store` keeps values.
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
        """Has its own name, so that no section of a configuration file applies to it."""

    shell: WorkerShell = Shell.instance(receiver, program, user_module=sys.modules["__main__"], **options)
    shell.run_cell("%load_ext storemagic", store_history=False)  # As each application of IPython does.
    return shell


def _print_page(_shell: Any, text: Any, *_args: Any, **_kwargs: Any) -> None:
    sys.stdout.write(f"{text.get('text/plain', '') if isinstance(text, dict) else text}\n")


def _close_figures() -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")  # As the front end does with those that it has shown.


def _stay(keep_kernel: bool = False) -> None:
    """Replaces `exit` and `quit`."""
