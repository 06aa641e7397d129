"""Shows the ranks of a notebook: `%%rank N`, `%%rank0`, `%ranks`, and a table below the cell that trains."""

from __future__ import annotations

import contextvars
import html
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from IPython.display import display

from unsloth_multigpu.notebook.kernel import Cell, Kernel
from unsloth_multigpu.notebook.kernel_share import Publisher, read_ranks
from unsloth_multigpu.overview import Overview, headline, table_of
from unsloth_multigpu.wire.child import read_tail
from unsloth_multigpu.wire.run import Run

_NUM_LOG_LINES = 40
_MOST_LINES = 1000
_EVERY_S = 1.0
_WIDTH = 200
_HTML = '<pre style="line-height: 1.4; white-space: pre; overflow-x: auto">{}</pre>'
_USAGE = "%ranks: all ranks. %ranks log [N]: the end of a log. %ranks on, off: output of every rank."


class RankMagics:
    """The magics in the kernel. Under `%%rank`, `publisher` is detached: each rank runs commands for itself."""

    def __init__(self, shell: Any, kernel: Kernel, publisher: Publisher, run: Run) -> None:
        self._shell = shell
        self._kernel = kernel
        self._publisher = publisher
        self._run = run
        self._shows_all = False
        # Workers whose output is shown at the end of the current cell.
        self._shown: set[int] = set()

    def open(self, stack: ExitStack) -> None:
        """Registers the magics until `stack` is closed."""
        for function, kind in ((self.rank, "cell"), (self.rank0, "cell"), (self.ranks, "line")):
            self._shell.register_magic_function(function, kind, function.__name__)
            stack.callback(self._shell.magics_manager.magics[kind].pop, function.__name__, None)

    def begin(self) -> None:
        """Called when a cell begins."""
        self._shown = {worker.rank for worker in self._kernel.workers} if self._shows_all else set()

    def end(self, cell: Cell) -> None:
        """Called when the cell has ended on all ranks: shows the output of workers."""
        for worker in self._kernel.workers:
            message = worker.ended.get(cell.number)
            if worker.rank in self._shown and message is not None:
                # A cell may have removed a log.
                with suppress(FileNotFoundError), worker.log.open("rb") as log:
                    log.seek(message["output_begin"])
                    text = log.read().decode("utf-8", "replace")
                    if message["traceback"] in str(cell.failure_error):
                        text = text.replace(message["traceback"], "")  # It is shown as part of the error.
                    sys.stdout.write(prefix_output(text, worker.rank))

    def rank(self, line: str, cell: str) -> None:
        """%%rank N: runs the cell on one rank, on several (0,2), or on all; the others skip it."""
        ranks = read_ranks(line, num_ranks := len(self._kernel.workers) + 1)
        is_apart = len(ranks) < num_ranks
        if (running := self._kernel.current) is not None:
            running.is_partial |= is_apart
        self._shown |= ranks - {0}
        if 0 in ranks:
            with self._publisher.detached(is_apart=is_apart):
                result = self._shell.run_cell(cell)
            result.raise_error()

    def rank0(self, _line: str, cell: str) -> None:
        """%%rank0: runs the cell on rank 0; the others skip it."""
        self.rank("0", cell)

    def ranks(self, line: str) -> None:
        """%ranks: a table of the ranks: device, step, speed, memory, process; see `%ranks help`."""
        words = line.split()
        if words in (["on"], ["off"]):
            self._shows_all = words == ["on"]
        elif words[:1] == ["log"] and len(words) <= 2 and all(map(str.isdecimal, words[1:])):
            rank = int(words[1]) if words[1:] else 1
            found = [worker for worker in self._kernel.workers if worker.rank == rank]
            sys.stdout.write(read_tail(found[0].log, _NUM_LOG_LINES) + "\n" if found else f"rank {rank} has no log\n")
        elif words:
            sys.stdout.write(_USAGE + "\n")
        else:
            sys.stdout.write("\n".join(table_of(Overview(self._run).look())) + "\n")


def prefix_output(text: str, rank: int) -> str:
    """Returns a worker's output in a cell, with its rank before each line."""
    # Of a progress bar, only the last state is kept.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.removesuffix("\n").split("\n")]
    if lines == [""]:
        return ""
    cut = [f"... {len(lines) - _MOST_LINES} earlier lines in the log"] if len(lines) > _MOST_LINES else []
    return "".join(f"[rank{rank}] {line}\n" for line in [*cut, *lines[-_MOST_LINES:]])


class Panel:
    """Shows a table of the ranks below the cell during a training. Afterwards the last state stays there."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, is_in_cell: Callable[[], bool]) -> None:
        """Called when a training begins. `is_in_cell` returns False once the running cell has ended."""
        self.end()
        self._stop.clear()
        # ipykernel assigns output to a cell by context variables, which a new thread does not inherit.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._follow, is_in_cell), name="unsloth_multigpu-panel", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Called after the training: shows the last figures and ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()

    def _follow(self, is_in_cell: Callable[[], bool]) -> None:
        overview, handle = Overview(self._run), None
        is_over = False
        while not is_over:
            is_over = self._stop.wait(_EVERY_S) or not is_in_cell()
            look = overview.look()
            # There is no table for a training that this package does not steer, and for one of less than a second.
            has_begun = any(row["phase"] != "script" for row in look["ranks"])
            if handle is None and has_begun and not is_over:
                handle = display(bundle(look), raw=True, display_id=True)
            elif handle is not None:
                handle.update(bundle(look), raw=True)


def bundle(look: Mapping[str, Any]) -> dict[str, str]:
    """Returns the table as a MIME bundle: as text, and the same text in HTML."""
    text = "\n".join([headline(look), *table_of(look, _WIDTH)])
    return {"text/plain": text, "text/html": _HTML.format(html.escape(text))}
