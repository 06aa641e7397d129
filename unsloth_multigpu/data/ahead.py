"""Values that are made before they are asked for, beside what the main thread does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")


class Ahead(Generic[_Value]):
    """A value that is made once: by a thread of its own where it was started, else by whoever asks first.

    Pickled it is its value: the queue of a loader's worker makes it in a thread as well.

    Args:
        make: Makes the value. It reads nothing that changes.
    """

    def __init__(self, make: Callable[[], _Value]) -> None:
        self._make = make
        self._made: Future[_Value] | None = None

    def start(self) -> None:
        """Begins to make the value; the thread ends with it."""
        if self._made is None:
            self._made = Future()
            Thread(target=self._fill, args=(self._made,), name="unsloth-multigpu-plan", daemon=True).start()

    def result(self) -> _Value:
        """The value, or what was raised while it was made."""
        if self._made is None:
            self._made = Future()
            self._fill(self._made)
        return self._made.result()

    def _fill(self, made: Future[_Value]) -> None:
        try:
            made.set_result(self._make())
        except Exception as error:  # Raised by `result`, where it can be handled.
            made.set_exception(error)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return _made, (self.result(), None)
        except Exception as error:  # A queue would lose the item: who asks for the value has to know.
            return _made, (None, error)


def _made(value: Any, error: Exception | None) -> Ahead[Any]:
    def make() -> Any:
        if error is not None:
            raise error
        return value

    return Ahead(make)
