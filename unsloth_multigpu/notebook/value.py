"""Values that only rank 0 makes, such as the output of a command or what the user typed. Other ranks wait for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.group.outcome import error_of, failure
from unsloth_multigpu.notebook.kernel import Cell, Kernel

# A worker tells the kernel that it waits only after this time: most values come sooner, and a message costs time.
_TELL_AFTER_S = 0.5
_WAIT_S = 0.2
_MESSAGE_CHARACTERS = 120


class LeftAloneError(DistributedError):
    """Rank 0 has left the cell without making a value that this rank waits for."""


class Publisher:
    """Rank 0: makes values and sends them.

    The key of a value is its kind with its text, and a count of that kind in the cell. Ranks that take the same path
    through a cell ask for the same keys; a rank that takes another path does not get a wrong value.

    Attributes:
        is_apart: No other rank runs what rank 0 runs now.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._counts: Counter[str] = Counter()
        self._cell_number = 0
        self._depth = 0
        self.is_apart = False

    @property
    def is_abandoned(self) -> bool:
        """All other ranks have ended the cell that runs here."""
        return self._kernel.current is not None and not self._kernel.pending()

    def make(self, kind: str, make: Callable[[], Any], *, is_value: bool = True) -> Any:
        """Calls `make` and sends its result to the other ranks. A call inside another one only calls `make`.

        Args:
            kind: What is made, with the text of its command or question; the same on all ranks.
            make: Runs on this rank only. The other ranks get its result, if that is a text, a number or lines of text,
                and else None. What it raises is raised there as well.
            is_value: See `Receiver.wait_for`.
        """
        cell = self._kernel.current
        if cell is None:
            return make()
        self._know(cell)
        if self._depth:
            return _stoppable(cell, make)
        key = f"{kind}/{self._counts[kind]}"
        self._counts[kind] += 1
        # KeyboardInterrupt is not sent as the value's error: Stop asks each rank to leave the cell.
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
        """Inside, sends nothing, because not all of the other ranks run this code.

        Args:
            is_apart: None of them does.
        """
        if self._kernel.current is not None:
            self._know(self._kernel.current)
        before, self.is_apart = self.is_apart, is_apart or self.is_apart
        self._depth += 1
        try:
            yield
        finally:
            self._depth = max(0, self._depth - 1)
            self.is_apart = before

    def _know(self, cell: Cell) -> None:
        if cell.number != self._cell_number:
            # The depth may be above 0: the last cell was left by force, or one of its threads still runs.
            self._cell_number, self._counts, self._depth = cell.number, Counter(), 0


class Receiver:
    """A rank above 0: knows which cell runs, and waits for the values that rank 0 makes in it.

    The main thread runs cells and waits; the thread that listens to the kernel calls `put` and `note_left`.

    Args:
        send: Sends a message to the kernel: its kind and fields.

    Attributes:
        cell_number: Number of the cell that runs; 0 = none.
        is_replay: The cell is one that rank 0 ran before it had other ranks.
        is_detached: See `detached`.
        is_apart: See `detached`.
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
        """Rank 0 has left the cell that runs here, and makes no more values in it."""
        return self._left_cell >= self.cell_number > 0

    def put(self, message: dict[str, Any]) -> None:
        """Takes the message with which rank 0 sends a value."""
        with self._has_news:
            self._values[message["key"]] = message
            self._has_news.notify_all()

    def note_left(self, cell_number: int) -> None:
        """Rank 0 has left this cell."""
        with self._has_news:
            self._left_cell = cell_number
            self._has_news.notify_all()

    @contextmanager
    def detached(self, *, is_apart: bool) -> Iterator[None]:
        """Inside, this rank does itself what it would otherwise wait for.

        Args:
            is_apart: Rank 0 does not run this code.
        """
        self.is_detached, self.is_apart = True, is_apart
        try:
            yield
        finally:
            self.is_detached = self.is_apart = False

    def make(self, kind: str, make: Callable[[], Any], *, is_value: bool = True) -> Any:
        """The other side of `Publisher.make`: waits for the value; makes it where rank 0 does not."""
        return make() if self.is_detached else self.wait_for(kind, is_value=is_value)

    def wait_for(self, kind: str, *, is_value: bool = True) -> Any:
        """Waits until rank 0 has made the value, as long as it takes.

        Args:
            kind: See `Publisher.make`.
            is_value: The code uses the result. What gives none, such as `%pip`, is skipped in a replayed cell, where
                rank 0 has done it already.

        Raises:
            DistributedError: Rank 0 could not make it. It is of the class of rank 0's error as well.
            LeftAloneError: Rank 0 has left the cell without making it, or it was made before this rank existed.
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

        is_told = False
        with self._has_news:
            while self._values.get(key, {}).get("cell_number") != self._counted_cell:
                if self._left_cell >= self._counted_cell:
                    raise LeftAloneError(
                        f"rank 0 has left the cell without {_shortened(kind)}.",
                        hint="Let all ranks take the same way through the cell.",
                    )
                if not self._has_news.wait(_WAIT_S if is_told else _TELL_AFTER_S) and not is_told:
                    is_told = True
                    self._send("waits", cell_number=self._counted_cell, collective=last_collective())
            message = self._values.pop(key)
        if is_told:
            self._send("waits", cell_number=self._counted_cell, collective=None)
        return message


def _stoppable(cell: Cell, make: Callable[[], Any]) -> Any:
    """On Stop, IPython ends the program and continues the cell. Only rank 0 would do that, so this raises."""
    stop_s = cell.stop_s
    value = make()
    if cell.stop_s != stop_s:
        raise KeyboardInterrupt("Stop was pressed.")
    return value


def _shortened(kind: str) -> str:
    """A command in one line of a message."""
    line = " ".join(kind.split())
    return line if len(line) <= _MESSAGE_CHARACTERS else f"{line[:_MESSAGE_CHARACTERS]}..."


def _plain(value: Any) -> Any:
    """As JSON holds it: None for what is neither a number nor a text, nor lines of text."""
    if isinstance(value, list):
        return [str(line) for line in value]
    return str(value) if isinstance(value, str) else value if isinstance(value, int) else None


def like_ipython(output: Any) -> Any:
    """What a command or a magic has returned, in the types of IPython, which have `x.s`, `x.l` and so on."""
    from IPython.utils.text import LSString, SList

    return SList(output) if isinstance(output, list) else LSString(output) if isinstance(output, str) else output
