"""Values that a thread makes before they are asked for, while the main thread works."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
            pool = ThreadPoolExecutor(1, thread_name_prefix="unsloth-multigpu-plan")
            self._made = pool.submit(self._make)
            pool.shutdown(wait=False)

    def result(self) -> _Value:
        """The value, or what was raised while it was made."""
        if self._made is None:
            value = self._make()
            self._made = Future()
            self._made.set_result(value)
        return self._made.result()

    def __reduce__(self) -> tuple[Any, ...]:
        self.start()
        assert self._made is not None
        # A queue would lose an item that raises: who asks for the value has to know.
        error = self._made.exception()
        return _made, (None if error else self._made.result(), error)


def _made(value: Any, error: BaseException | None) -> Ahead[Any]:
    def make() -> Any:
        if error is not None:
            raise error
        return value

    return Ahead(make)
