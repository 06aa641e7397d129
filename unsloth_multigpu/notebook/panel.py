"""A table of the ranks under the cell that trains. A thread updates it, because the kernel is busy."""

from __future__ import annotations

import contextvars
import html
import threading
from collections.abc import Callable
from typing import Any

from unsloth_multigpu.overview import Look, Overview, headline, table_of
from unsloth_multigpu.wire.heartbeat import Phase
from unsloth_multigpu.wire.run import Run

_EVERY_S = 1.0
_WIDTH = 200
_HTML = '<pre style="line-height: 1.4; white-space: pre; overflow-x: auto">{}</pre>'


class Panel:
    """Shows the table from the first second of a training to its end, where it stays as it was last.

    It is text, for front ends that show no HTML, and the same text in HTML.

    Args:
        run: The run of this notebook.
        display: IPython's; None = as it is imported.
    """

    def __init__(self, run: Run, display: Callable[..., Any] | None = None) -> None:
        self._run = run
        self._display = display
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, is_in_cell: Callable[[], bool]) -> None:
        """A training begins in the cell that runs.

        Args:
            is_in_cell: False once that cell is over.
        """
        self.end()
        self._stop.clear()
        # What is shown belongs to this cell, whose number the main thread knows.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._follow, is_in_cell), name="unsloth_multigpu-panel", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """The training is over: shows the last figures and ends the thread."""
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
            # A training that is not steered has no phases. One that took less than a second needs no table.
            has_begun = any(row.beat.phase != Phase.SCRIPT for row in look.rows)
            if handle is None and has_begun and not is_over:
                handle = self._show(bundle(look))
            elif handle is not None:
                handle.update(bundle(look), raw=True)

    def _show(self, shown: dict[str, str]) -> Any:
        if self._display is None:
            from IPython.display import display

            self._display = display
        return self._display(shown, raw=True, display_id=True)


def bundle(look: Look) -> dict[str, str]:
    """The table as text and in HTML, as a front end takes it."""
    text = "\n".join([headline(look), *table_of(look, _WIDTH)])
    return {"text/plain": text, "text/html": _HTML.format(html.escape(text))}
