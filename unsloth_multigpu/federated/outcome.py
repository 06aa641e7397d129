"""What the user's code raised, where it must not end what called it."""

from __future__ import annotations

from types import TracebackType


class Outcome:
    """`with outcome:` holds what its block raised.

    Attributes:
        error: None where the block ended.
    """

    error: BaseException | None = None

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: TracebackType | None) -> bool:
        self.error = error
        # sys.exit() in a client's function ends the client, not the slot. Ctrl-C and the like go on.
        return isinstance(error, Exception | SystemExit)

    def __str__(self) -> str:
        """One line."""
        return " ".join(f"{type(self.error).__name__}: {self.error}".split())
