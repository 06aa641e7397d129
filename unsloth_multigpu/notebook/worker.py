"""The program of a worker: runs every cell that the kernel runs, in an IPython shell of its own."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Coroutine, Mapping
from typing import Any

from unsloth_multigpu.errors import ConfigError, MultiGPUError, SetupError
from unsloth_multigpu.notebook.cell import error_text, log_header, names_broken_group
from unsloth_multigpu.notebook.channel import Channel
from unsloth_multigpu.notebook.monitor import RAISE_SIGNAL
from unsloth_multigpu.notebook.variables import RankVariables
from unsloth_multigpu.options import ENV_NOTEBOOK, ENV_SUPERVISOR_PID

_TRACEBACK_CHARACTERS = 8000


class LeftCell(BaseException):
    """Raised in the main thread to leave a cell that the kernel has left. No `except Exception` of a cell holds it."""


class ReplayedLineError(SetupError, ConfigError):
    """Raised by the line in a cell that is run again: rank 0's call has failed or was stopped there."""


class Worker:
    """One rank above 0. The main thread runs cells, a thread of its own listens to the kernel.

    Attributes:
        number: Of the cell that runs; 0 = none.
        left: The last cell that rank 0 has left.
        is_replay: The cell is one that rank 0 ran before it had other ranks; so is what its shell began with.
        start_failures: What has failed of that, see `start_alike`.
        shown_error: What the shell has shown of an error that its result does not tell.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.number = 0
        self.left = 0
        self.is_replay = True
        self.start_failures: list[str] = []
        self.shown_error: BaseException | None = None
        self.values: dict[str, dict[str, Any]] = {}
        self.has_value = threading.Condition()
        self.shell: Any = None
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self._main_thread = threading.get_ident()
        # With the number of the cell that it is to end.
        self._pending: tuple[int, BaseException] | None = None
        self._is_asked = False
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[Any] | None = None

    def run(self) -> None:
        """Takes orders until the kernel is gone."""
        signal.signal(RAISE_SIGNAL, self._raise_pending)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # One for all cells: what one of them has begun another may await.
        asyncio.set_event_loop(self._loop)
        self.shell.loop_runner = self._run_coroutine
        threading.Thread(target=self._listen, name="unsloth_multigpu-channel", daemon=True).start()
        self.channel.send("ready", failures=self.start_failures)
        while True:
            self._obey(self._orders.get())

    def _listen(self) -> None:
        try:
            self._take_messages()
        finally:
            # By an error: a worker that hears nothing would hold every cell.
            traceback.print_exc()
            os._exit(1)

    def _take_messages(self) -> None:
        while True:
            messages = self.channel.receive()
            if messages is None:
                os._exit(0)  # The kernel is gone.
            for message in messages:
                self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind in ("cell", "open"):
            self._orders.put(message)
        elif kind == "exit":
            os._exit(0)
        elif kind == "value":
            with self.has_value:
                self.values[message["key"]] = message
                self.has_value.notify_all()
        elif kind == "left":
            with self.has_value:
                self.left = message["number"]
                self.has_value.notify_all()
        elif message["number"] != self.number:
            return  # It has ended meanwhile.
        elif kind == "interrupt":
            self._is_asked = True
            error = KeyboardInterrupt() if message["is_stop"] else LeftCell("Rank 0 has left the cell.")
            self._pending = message["number"], error
            signal.pthread_kill(self._main_thread, RAISE_SIGNAL)
        elif kind == "abort":
            from unsloth_multigpu.notebook.group import abort_group

            abort_group(message["pids"])

    def _raise_pending(self, _number: int, _frame: object) -> None:
        pending, self._pending = self._pending, None
        # The main thread may have come to the next cell meanwhile, or to the making of a new group.
        if pending is None or pending[0] != self.number:
            return
        error = pending[1]
        if self._task is not None and asyncio.current_task(self._loop) is not self._task:
            self._loop.call_soon_threadsafe(self._task.cancel)  # The event loop, or another task of it, runs.
        else:
            raise error from None

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a cell that awaits. Tasks that it has begun go on with the next one that awaits."""
        self._task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(self._task)
        finally:
            self._task = None

    def _obey(self, order: Mapping[str, Any]) -> None:
        from unsloth_multigpu.launch.pulse import last_collective
        from unsloth_multigpu.notebook.value import LeftAloneError

        self._is_asked = False
        try:
            try:
                self.number = order["number"]
                error = self._run_cell(order) if order["kind"] == "cell" else self._open_group(order)
            finally:
                self.number = 0
        except (KeyboardInterrupt, LeftCell) as asked:  # IPython itself was just beginning or ending the cell.
            error = asked
        self.number = 0
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        is_end = isinstance(error, (KeyboardInterrupt, LeftCell, asyncio.CancelledError))
        self.channel.send(
            "ended",
            number=order["number"],
            error=error_text(error),
            traceback="" if error is None else _traceback(error),
            # An error of its own that came first stays its own.
            is_asked=self._is_asked and error is not None and (is_end or names_broken_group(error)),
            is_left_alone=isinstance(error, LeftAloneError),
            collective=last_collective(),
        )

    def _run_cell(self, order: Mapping[str, Any]) -> BaseException | None:
        self.is_replay = "random_state" not in order
        self.shown_error = None
        if not self.is_replay:
            from unsloth_multigpu.group.random_state import write_random_state

            write_random_state(order["random_state"])
            if order["folder"]:
                os.chdir(order["folder"])
        else:
            _claim_device()
        sys.stdout.write(log_header(order["number"], order["source"]))
        self.shell.execution_count = order["execution_count"]
        result = self.shell.run_cell(order["source"], store_history=True)
        error: BaseException | None = result.error_in_exec or result.error_before_exec or self.shown_error
        # Rank 0 has left the cell there, too.
        return None if self.is_replay and isinstance(error, ReplayedLineError) else error

    @staticmethod
    def _open_group(order: Mapping[str, Any]) -> BaseException | None:
        from unsloth_multigpu.notebook.start import join_group

        try:
            join_group(order)
        except (RuntimeError, OSError, MultiGPUError) as error:
            return error
        return None


def _claim_device() -> None:
    """A cell from before the line finds this rank's card as "cuda", as later cells do."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))


def _traceback(error: BaseException) -> str:
    """What Python prints of it, from the cell on."""
    tb = error.__traceback__
    while tb is not None and not tb.tb_frame.f_code.co_filename.startswith("<ipython-input-"):
        tb = tb.tb_next
    lines = traceback.format_exception(type(error), error, tb or error.__traceback__)
    text = re.sub(r'File "<ipython-input-(\d+)-[0-9a-f]+>"', r"Cell In[\1]", "".join(lines))
    return text[-_TRACEBACK_CHARACTERS:]


def main() -> None:
    """Runs this process as a worker: `sys.argv[1]` is its end of the channel."""
    from unsloth_multigpu.launch.rank import die_with_supervisor
    from unsloth_multigpu.notebook.share import prepare_worker

    descriptor = int(sys.argv[1])
    die_with_supervisor(int(os.environ[ENV_SUPERVISOR_PID]))
    os.set_inheritable(descriptor, False)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        # The log is read as UTF-8, and the kernel's own output takes any text, whatever the locale is.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    worker = Worker(Channel(socket.socket(fileno=descriptor)))
    told = json.loads(os.environ[ENV_NOTEBOOK])
    os.environ[ENV_NOTEBOOK] = "read"  # It holds values of the user's, which programs need not see.
    sys.path[:] = told["path"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    prepare_worker(worker, RankVariables({}, told["before"]), told["shell"])
    worker.run()
