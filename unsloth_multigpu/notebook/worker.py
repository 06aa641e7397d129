"""A worker process: a rank above 0, which runs every cell of the kernel in an IPython shell of its own."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import sys
import threading
import traceback
import types
from collections.abc import Coroutine, Mapping
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.group.random_state import write_random_state
from unsloth_multigpu.launch.question import prompts_answered
from unsloth_multigpu.launch.rank import die_with_supervisor, last_collective
from unsloth_multigpu.notebook.cell_program import ReplayedLineError, WorkerProgram
from unsloth_multigpu.notebook.kernel import Channel, error_text, names_broken_group, raise_or_cancel
from unsloth_multigpu.notebook.kernel_share import (
    LeftAloneError,
    Receiver,
    done_by_rank_0,
    notebook_patches,
    read_ranks,
)
from unsloth_multigpu.notebook.monitor import RAISE_SIGNAL
from unsloth_multigpu.notebook.recovery import abort_group
from unsloth_multigpu.options import ENV_NOTEBOOK
from unsloth_multigpu.patching import PatchRegistry
from unsloth_multigpu.wire.child import connect_to_parent
from unsloth_multigpu.wire.context import RunContext

_TRACEBACK_CHARACTERS = 8000


class LeftCell(BaseException):
    """Raised in the main thread to end a cell that rank 0 has left. `except Exception` does not catch it."""


class Worker:
    """The loop of a worker. The main thread runs cells, and a second thread receives messages of the kernel.

    `receiver` waits for values of rank 0, and has the number of the current cell.
    """

    def __init__(self, channel: Channel, receiver: Receiver, program: WorkerProgram, shell: WorkerShell) -> None:
        self.channel = channel
        self.receiver = receiver
        self._program = program
        self._shell = shell
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self._main_thread = threading.get_ident()
        # Number of a cell, and the error to raise in it.
        self._pending: tuple[int, BaseException] | None = None
        self._is_asked = False
        self._order_number = 0
        # Bytes of the log before the output of the cell.
        self._output_begin = 0
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[Any] | None = None

    def run(self) -> None:
        """Executes the kernel's orders until the kernel is gone."""
        signal.signal(RAISE_SIGNAL, self._raise_pending)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # One event loop for all cells: a cell may await a task of an earlier one.
        asyncio.set_event_loop(self._loop)
        self._shell.loop_runner = self._run_coroutine
        threading.Thread(target=self._listen, name="unsloth_multigpu-channel", daemon=True).start()
        self.channel.send("ready")
        while True:
            self._execute(self._orders.get())

    def _listen(self) -> None:
        try:
            while (messages := self.channel.receive()) is not None:
                for message in messages:
                    self._handle(message)
            os._exit(0)  # The kernel is gone.
        finally:
            # Reached only after an error. A worker that does not listen would block every cell.
            traceback.print_exc()
            os._exit(1)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind in ("cell", "open"):
            self._orders.put(message)
        elif kind == "exit":
            os._exit(0)
        elif kind == "value":
            self.receiver.put(message)
        elif kind == "left":
            self.receiver.note_left(message["cell_number"])
        elif message["cell_number"] != self.receiver.cell_number:
            return  # The cell of the message has ended meanwhile.
        elif kind == "interrupt":
            self._is_asked = True
            error = KeyboardInterrupt() if message["is_stop"] else LeftCell("Rank 0 has left the cell.")
            self._pending = message["cell_number"], error
            signal.pthread_kill(self._main_thread, RAISE_SIGNAL)
        elif kind == "abort":
            abort_group(message["pids"])

    def _raise_pending(self, _signal_number: int, _frame: object) -> None:
        pending, self._pending = self._pending, None
        # By now the main thread may run the next cell, or open a new group.
        if pending is None or pending[0] != self.receiver.cell_number:
            return
        raise_or_cancel(self._task, pending[1])

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs an async cell. Tasks that it leaves behind continue in the next async cell."""
        self._task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(self._task)
        finally:
            self._task = None

    def _execute(self, order: Mapping[str, Any]) -> None:
        error: BaseException | None = None
        try:
            try:
                self._enter(order)
                if order["kind"] == "cell":
                    error = self._run_cell(order)
                else:
                    self._program.join_group(order)
            finally:
                self.receiver.cell_number = 0
        # Those that a signal raises may come before IPython handles errors of the cell, or afterwards.
        except (RuntimeError, OSError, MultiGPUError, KeyboardInterrupt, LeftCell) as raised:
            error = raised
        self.receiver.cell_number = 0
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        is_end = isinstance(error, (KeyboardInterrupt, LeftCell, asyncio.CancelledError))
        self.channel.send(
            "ended",
            cell_number=self._order_number,
            error=error_text(error),
            traceback="" if error is None else _traceback(error),
            # True if the error only follows from the kernel's request to leave the cell.
            is_asked=self._is_asked and error is not None and (is_end or names_broken_group(error)),
            is_left_alone=isinstance(error, LeftAloneError),
            collective=last_collective(),
            output_begin=self._output_begin,
        )

    def _enter(self, order: Mapping[str, Any]) -> None:
        """Begins an order. A cell without a random state is a replayed one: rank 0 has run it before."""
        self._is_asked, self._order_number = False, order["cell_number"]
        is_cell, is_replay = order["kind"] == "cell", "random_state" not in order
        self.receiver.enter(order["cell_number"], is_replay=is_cell and is_replay)
        if not is_cell:
            return
        self._program.await_rank_0 = self._await_rank_0 if order.get("has_line") else None
        if is_replay:
            # "cuda" means this rank's GPU in replayed cells too.
            if torch.accelerator.is_available():
                torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
            return
        write_random_state(order["random_state"])
        if order["folder"]:
            os.chdir(order["folder"])

    def _await_rank_0(self) -> None:
        """Called at `enable_multi_gpu()` in a replayed cell: opens the group, and begins the rest of the cell."""
        self.channel.send("ready")
        self._execute(self._orders.get())
        self._enter(self._orders.get())

    def _run_cell(self, order: Mapping[str, Any]) -> BaseException | None:
        self._shell.shown_error = None
        sys.stdout.write(f"---- cell {order['cell_number']}\n{order['source']}\n----\n")
        sys.stdout.flush()
        self._output_begin = os.fstat(1).st_size  # A cell may have replaced sys.stdout.
        self._shell.execution_count = order["execution_count"]
        result = self._shell.run_cell(order["source"], store_history=True)
        error: BaseException | None = result.error_in_exec or result.error_before_exec or self._shell.shown_error
        # Rank 0 has failed in the same way: in its call of enable_multi_gpu(), or with the syntax error.
        return None if self.receiver.is_replay and isinstance(error, ReplayedLineError | SyntaxError) else error


class WorkerShell(InteractiveShell):  # type: ignore[misc, unused-ignore]
    """The IPython shell of a worker. Rank 0 runs commands and some magics for it, and its output goes to a log.

    A subclass, because no attribute is set on an object of another library.

    Attributes:
        multi_gpu_program: The program of this process; `find_worker_program` finds it here.
        shown_error: An error that ended the cell, but that its result does not have; None without any.
    """

    multi_gpu_program: WorkerProgram
    shown_error: BaseException | None
    _receiver: Receiver

    def __init__(self, receiver: Receiver, program: WorkerProgram, **options: Any) -> None:
        self._receiver = receiver
        self.multi_gpu_program = program
        self.shown_error = None
        super().__init__(**options)
        self.events.register("post_execute", _close_figures)
        self.register_magic_function(self._rank, "cell", "rank")
        self.register_magic_function(lambda _line, cell: self._rank("0", cell), "cell", "rank0")

    def _rank(self, line: str, cell: str) -> None:
        ranks = read_ranks(line, num_ranks := int(os.environ["WORLD_SIZE"]))
        if int(os.environ["RANK"]) in ranks:
            with self._receiver.detached(is_apart=len(ranks) < num_ranks):
                self.run_cell(cell)  # `showtraceback` records its error.

    def showtraceback(self, exc_tuple: Any = None, *_args: Any, **_kwargs: Any) -> None:
        """Writes an error to the log, and sets `shown_error` if IPython will not return it."""
        # IPython does not return the error of a cell that runs inside a magic (%%capture, %%time) or another cell.
        # Errors shown elsewhere did not end the cell: a `_repr_html_` that failed, an error that the cell has caught.
        of_ipython = super()
        codes = {getattr(of_ipython, name).__code__ for name in ("run_cell", "run_line_magic", "run_cell_magic")}
        num_inside = sum(frame.f_code in codes for frame, _ in traceback.walk_stack(None))
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if exc_tuple is None and num_inside > 1:
            self.shown_error = error
        if isinstance(error, ReplayedLineError):
            sys.stdout.write("Rank 0 has left this cell here.\n")
        elif error is not None:  # IPython takes seconds to format a deep stack. The kernel shows this text.
            sys.stdout.write(_traceback(error))

    showsyntaxerror = showindentationerror = showtraceback

    def enable_matplotlib(self, gui: str | None = None) -> tuple[str | None, str]:
        """Selects "agg", because rank 0 draws and shows plots."""
        return gui, "agg"

    def ask_exit(self) -> None:
        """Does nothing: a worker ends with the kernel."""


def main() -> None:
    """Runs this process as a worker."""
    kernel_pid = RunContext.read(os.environ).supervisor_pid
    assert kernel_pid is not None
    die_with_supervisor(kernel_pid)
    channel = Channel(connect_to_parent())
    settings = json.loads(os.environ[ENV_NOTEBOOK])
    os.environ[ENV_NOTEBOOK] = "read"  # Drops the user's values, which programs that cells start do not need.
    # Only rank 0 draws plots and writes to W&B.
    os.environ.update(MPLBACKEND="agg", WANDB_MODE="disabled")
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    receiver = Receiver(channel.send)
    program = WorkerProgram(receiver, settings["options"])
    # IPython also formats each traceback for its history. Other modes need seconds for that.
    config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"xmode": "Minimal"}})
    shell = WorkerShell.instance(receiver, program, config=config, user_module=main_module)
    sys.breakpointhook = lambda *_args, **_kwargs: None
    PatchRegistry(notebook_patches(receiver.share)).apply()
    with prompts_answered(receiver.share), done_by_rank_0(shell, receiver, settings["before"]):
        Worker(channel, receiver, program, shell).run()


def _traceback(error: BaseException) -> str:
    """Formats an error with its traceback, without the frames above the cell."""
    tb = error.__traceback__
    while tb is not None and not tb.tb_frame.f_code.co_filename.startswith("<ipython-input-"):
        tb = tb.tb_next
    lines = traceback.format_exception(type(error), error, tb or error.__traceback__)
    text = re.sub(r'File "<ipython-input-(\d+)-[0-9a-f]+>"', r"Cell In[\1]", "".join(lines))
    return text[-_TRACEBACK_CHARACTERS:]


def _close_figures() -> None:
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close("all")  # As the inline backend does in the kernel, after it has shown the figures.
