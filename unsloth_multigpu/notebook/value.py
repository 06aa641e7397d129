"""Values that rank 0 alone makes: what a shell command returned, what the user typed. The other ranks wait for them."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.notebook.kernel import Cell, Kernel

if TYPE_CHECKING:
    from unsloth_multigpu.notebook.worker import Worker

# Told to the kernel only where the wait is one: a message costs more than most values.
_TELL_AFTER_S = 0.5
_WAIT_S = 0.2
_MESSAGE_CHARACTERS = 120


class LeftAloneError(DistributedError):
    """Rank 0 has left the cell without making a value that this rank waits for."""


class FailedOnRank0Error(DistributedError):
    """Rank 0 could not make a value."""


class Publisher:
    """Rank 0: makes values and sends them.

    Values are known by the cell, their kind with its text, and how many of these there were in the cell: ranks that
    take the same way through a cell ask for the same ones, and one that takes another does not get their value.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._counts: Counter[str] = Counter()
        self._number = 0
        self._depth = 0

    def make(self, kind: str, make: Callable[[], Any], to_plain: Callable[[Any], Any] = lambda value: value) -> Any:
        """Calls `make`, and sends what it returns to the other ranks. Within another such call it only calls it.

        Args:
            kind: What is made, with the text of its command or question: the same on all ranks.
            make: Runs here alone. What it raises is raised on the other ranks too.
            to_plain: Its result as JSON can say it; the others get that.
        """
        cell = self._kernel.current
        if cell is None:
            return make()
        self._know(cell)
        if self._depth:
            return _stoppable(cell, make)
        key = f"{kind}/{self._counts[kind]}"
        self._counts[kind] += 1
        # Stop is no error of the value: the others are asked to leave the cell by themselves.
        try:
            with self.alone():
                value = _stoppable(cell, make)
            plain = to_plain(value)
        except Exception as error:
            self._kernel.send("value", key=key, number=cell.number, error=describe_error(error))
            raise
        self._kernel.send("value", key=key, number=cell.number, value=plain, error=None)
        return value

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For a time nothing is sent: what runs here has no counterpart on the other ranks."""
        if self._kernel.current is not None:
            self._know(self._kernel.current)
        self._depth += 1
        try:
            yield
        finally:
            self._depth = max(0, self._depth - 1)

    def _know(self, cell: Cell) -> None:
        if cell.number != self._number:
            # A cell may have been left by force, or by a thread that still runs.
            self._number, self._counts, self._depth = cell.number, Counter(), 0


class Receiver:
    """A rank above 0: waits for values.

    Attributes:
        is_alone: See `alone`.
        is_apart: See `alone`.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._counts: Counter[str] = Counter()
        self._number = 0
        self.is_alone = False
        self.is_apart = False

    @contextmanager
    def alone(self, *, is_apart: bool) -> Iterator[None]:
        """For a time this rank does by itself what it would wait for.

        Args:
            is_apart: Rank 0 does not run this code.
        """
        self.is_alone, self.is_apart = True, is_apart
        try:
            yield
        finally:
            self.is_alone = self.is_apart = False

    def wait_for(self, kind: str, *, is_value: bool = True) -> Any:
        """Waits until rank 0 has made the value, as long as it takes.

        Args:
            kind: See `Publisher.make`.
            is_value: The code goes on with it. What is none, such as `%pip`, is passed over in a cell that is run
                again: rank 0 has done it then.

        Raises:
            FailedOnRank0Error: It could not, and its error is of a class that is not known here.
            LeftAloneError: It has left the cell without, or is not in a cell.
        """
        worker = self._worker
        if worker.is_replay:
            if is_value:
                raise LeftAloneError(
                    f"{_shortened(kind)} was run before enable_multi_gpu(), and its value is not known any more.",
                    hint="Restart the kernel, and call enable_multi_gpu() in the first cell.",
                )
            return None
        if worker.number != self._number:
            self._number, self._counts = worker.number, Counter()
            worker.values = {k: v for k, v in worker.values.items() if v["number"] >= self._number}
        key = f"{kind}/{self._counts[kind]}"
        self._counts[kind] += 1
        message = self._take(key, kind)
        if message["error"] is not None:
            failed = FailedOnRank0Error(
                f"rank 0 failed in {_shortened(kind)}: {message['error']['text']}", hint="See the error of rank 0."
            )
            raise rebuild_error(message["error"]) or failed from failed
        return message["value"]

    def _take(self, key: str, kind: str) -> dict[str, Any]:
        from unsloth_multigpu.launch.pulse import last_collective

        worker, is_told = self._worker, False
        with worker.has_value:
            while worker.values.get(key, {}).get("number") != self._number:
                if worker.left >= self._number:
                    raise LeftAloneError(
                        f"rank 0 has left the cell without {_shortened(kind)}.",
                        hint="Let all ranks take the same way through the cell.",
                    )
                if not worker.has_value.wait(_WAIT_S if is_told else _TELL_AFTER_S) and not is_told:
                    is_told = True
                    worker.channel.send("waits", number=self._number, collective=last_collective())
            message = worker.values.pop(key)
        if is_told:
            worker.channel.send("waits", number=self._number, collective=None)
        return message


def _stoppable(cell: Cell, make: Callable[[], Any]) -> Any:
    """IPython ends a program by Stop and goes on, here alone: the other ranks are asked to leave the cell."""
    stop_s = cell.stop_s
    value = make()
    if cell.stop_s != stop_s:
        raise KeyboardInterrupt("Stop was pressed.")
    return value


def _shortened(kind: str) -> str:
    """A command in one line of a message."""
    line = " ".join(kind.split())
    return line if len(line) <= _MESSAGE_CHARACTERS else f"{line[:_MESSAGE_CHARACTERS]}..."


def describe_error(error: Exception) -> dict[str, Any]:
    """An exception as JSON can say it: class, arguments and attributes as far as they are plain."""
    return {
        "class": [type(error).__module__, type(error).__qualname__],
        "arguments": [argument if _is_plain(argument) else str(argument) for argument in error.args],
        "attributes": {name: value for name, value in vars(error).items() if _is_plain(value)},
        "text": f"{type(error).__name__}: {error}",
    }


def rebuild_error(told: Mapping[str, Any]) -> Exception | None:
    """The same exception, so that the same `except` catches it; None where its class is not found here."""
    module, name = told["class"]
    try:
        kind = getattr(importlib.import_module(module), name)
        # Not by its constructor, which may want other arguments.
        error = kind.__new__(kind, *told["arguments"])
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    if not isinstance(error, Exception):
        return None
    error.args = tuple(told["arguments"])
    vars(error).update(told["attributes"])
    return error


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def plain_output(output: Any) -> Any:
    """Output of a program, as lines or as one text; None for all else that a magic returns."""
    return list(output) if isinstance(output, list) else str(output) if isinstance(output, str) else None


def like_ipython(output: Any) -> Any:
    """The same in the types of IPython, which can be asked for `x.s`."""
    from IPython.utils.text import LSString, SList

    return SList(output) if isinstance(output, list) else LSString(output) if isinstance(output, str) else output
