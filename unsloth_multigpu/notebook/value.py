"""Shares values that only rank 0 computes, such as the output of a command or the user's input, with all ranks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.group.outcome import error_of, failure
from unsloth_multigpu.notebook.kernel import Cell, Kernel

# A worker reports its wait to the kernel only after this time, because most values come sooner.
_REPORT_AFTER_S = 0.5
_WAIT_S = 0.2
_MESSAGE_CHARACTERS = 120


class LeftAloneError(DistributedError):
    """Rank 0 has left the cell without computing a value that this rank waits for."""


class Publisher:
    """On rank 0: computes values and sends them.

    The key of a value is its kind, which includes the text of the command, and the count of that kind in the cell.
    Ranks that take the same path through a cell use the same keys; a rank on another path does not get a wrong value.

    Attributes:
        is_apart: No other rank runs the code that rank 0 runs now.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._counts: Counter[str] = Counter()
        self._cell_number = 0
        self._depth = 0
        self.is_apart = False

    @property
    def is_abandoned(self) -> bool:
        """True if all other ranks have ended the current cell."""
        return self._kernel.current is not None and not self._kernel.pending()

    def make(self, kind: str, make: Callable[[], Any], *, is_value: bool = True) -> Any:
        """Calls `make` and sends its result or error to the other ranks. A nested call only calls `make`.

        Args:
            kind: Kind of the value, with the text of the command or question; equal on all ranks.
            make: Computes the value, on this rank only. The other ranks get None for a result that is not a text, an
                integer or a list of lines.
            is_value: See `Receiver.wait_for`.
        """
        cell = self._kernel.current
        if cell is None:
            return make()
        self._enter_cell(cell)
        if self._depth:
            return _stoppable(cell, make)
        key = f"{kind}/{self._counts[kind]}"
        self._counts[kind] += 1
        # KeyboardInterrupt is not sent: Stop interrupts each rank.
        try:
            with self.detached():
                value = _stoppable(cell, make)
        except Exception as error:
            self._kernel.send("value", key=key, cell_number=cell.number, error=failure(error))
            raise
        self._kernel.send("value", key=key, cell_number=cell.number, value=_plain(value), error=None)
        return value

    @contextmanager
    def detached(self, *, is_apart: bool = False) -> Iterator[None]:
        """Within the context nothing is sent: not all ranks run this code, and with `is_apart` no other rank does."""
        if self._kernel.current is not None:
            self._enter_cell(self._kernel.current)
        before, self.is_apart = self.is_apart, is_apart or self.is_apart
        self._depth += 1
        try:
            yield
        finally:
            self._depth = max(0, self._depth - 1)
            self.is_apart = before

    def _enter_cell(self, cell: Cell) -> None:
        if cell.number != self._cell_number:
            # The depth may be above 0 if the last cell was interrupted or one of its threads still runs.
            self._cell_number, self._counts, self._depth = cell.number, Counter(), 0


class Receiver:
    """On a rank above 0: waits for the values that rank 0 computes in the current cell.

    The main thread runs cells and waits; the thread that receives messages calls `put` and `note_left`. `send` sends a
    message to the kernel.

    Attributes:
        cell_number: Number of the current cell; 0 = none.
        is_replay: The cell is one that rank 0 ran before it had other ranks.
        is_detached: Within `detached`.
        is_apart: Within `detached(is_apart=True)`.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._values: dict[str, dict[str, Any]] = {}
        self._has_news = threading.Condition()
        # The last cell that rank 0 has left.
        self._left_cell = 0
        self._counts: Counter[str] = Counter()
        self._counted_cell = 0
        self.cell_number = 0
        self.is_replay = True
        self.is_detached = False
        self.is_apart = False

    @property
    def is_abandoned(self) -> bool:
        """True if rank 0 has left the current cell, and computes no more values in it."""
        return self._left_cell >= self.cell_number > 0

    def put(self, message: dict[str, Any]) -> None:
        """Stores a message with a value of rank 0."""
        with self._has_news:
            self._values[message["key"]] = message
            self._has_news.notify_all()

    def note_left(self, cell_number: int) -> None:
        """Records that rank 0 has left a cell."""
        with self._has_news:
            self._left_cell = cell_number
            self._has_news.notify_all()

    @contextmanager
    def detached(self, *, is_apart: bool) -> Iterator[None]:
        """Within the context this rank computes values itself. `is_apart`: rank 0 does not run this code."""
        self.is_detached, self.is_apart = True, is_apart
        try:
            yield
        finally:
            self.is_detached = self.is_apart = False

    def make(self, kind: str, make: Callable[[], Any], *, is_value: bool = True) -> Any:
        """The counterpart of `Publisher.make`: waits for the value, or computes it within `detached`."""
        return make() if self.is_detached else self.wait_for(kind, is_value=is_value)

    def wait_for(self, kind: str, *, is_value: bool = True) -> Any:
        """Waits until rank 0 has computed the value, without a limit.

        The code uses the value if `is_value`. Otherwise, as for `%pip`, it is skipped in a replayed cell, because
        rank 0 has done it already.

        Raises:
            DistributedError: Rank 0 has raised an error. This one is an instance of that error's class, too.
            LeftAloneError: Rank 0 has left the cell without the value, or computed it before this rank existed.
        """
        if self.is_replay:
            if is_value:
                raise LeftAloneError(
                    f"{_shortened(kind)} was run before enable_multi_gpu(), and its value is no longer known.",
                    hint="Restart the kernel, and call enable_multi_gpu() in the first cell.",
                )
            return None
        if self.cell_number != self._counted_cell:
            self._counted_cell, self._counts = self.cell_number, Counter()
            with self._has_news:
                kept = {key: v for key, v in self._values.items() if v["cell_number"] >= self.cell_number}
                self._values = kept
        key = f"{kind}/{self._counts[kind]}"
        self._counts[kind] += 1
        message = self._take(key, kind)
        if message["error"] is not None:
            raise error_of(message["error"], _shortened(kind))
        return message["value"]

    def _take(self, key: str, kind: str) -> dict[str, Any]:
        from unsloth_multigpu.launch.pulse import last_collective

        is_reported = False
        with self._has_news:
            while self._values.get(key, {}).get("cell_number") != self._counted_cell:
                if self._left_cell >= self._counted_cell:
                    raise LeftAloneError(
                        f"rank 0 has left the cell without {_shortened(kind)}.",
                        hint="Let all ranks run the same code in a cell.",
                    )
                if not self._has_news.wait(_WAIT_S if is_reported else _REPORT_AFTER_S) and not is_reported:
                    is_reported = True
                    self._send("waits", cell_number=self._counted_cell, collective=last_collective())
            message = self._values.pop(key)
        if is_reported:
            self._send("waits", cell_number=self._counted_cell, collective=None)
        return message


def _stoppable(cell: Cell, make: Callable[[], Any]) -> Any:
    """Calls `make`, and raises after Stop: IPython would end the command and continue the cell, on rank 0 only."""
    stop_s = cell.stop_s
    value = make()
    if cell.stop_s != stop_s:
        raise KeyboardInterrupt("Stop was pressed.")
    return value


def _shortened(kind: str) -> str:
    """Shortens a command to one line for messages."""
    line = " ".join(kind.split())
    return line if len(line) <= _MESSAGE_CHARACTERS else f"{line[:_MESSAGE_CHARACTERS]}..."


def _plain(value: Any) -> Any:
    """Converts a value to JSON: None if it is not an integer, a text or a list of lines."""
    if isinstance(value, list):
        return [str(line) for line in value]
    return str(value) if isinstance(value, str) else value if isinstance(value, int) else None


def like_ipython(output: Any) -> Any:
    """Converts the output of a command or magic to IPython's types, which have `x.s`, `x.l` and so on."""
    from IPython.utils.text import LSString, SList

    return SList(output) if isinstance(output, list) else LSString(output) if isinstance(output, str) else output
