"""Shows a table of the ranks below the cell that trains. A thread updates it, because the kernel is busy."""

from __future__ import annotations

import contextvars
import html
import threading
from collections.abc import Callable

from unsloth_multigpu.overview import Look, Overview, headline, table_of
from unsloth_multigpu.wire.heartbeat import Phase
from unsloth_multigpu.wire.run import Run

_EVERY_S = 1.0
_WIDTH = 200
_HTML = '<pre style="line-height: 1.4; white-space: pre; overflow-x: auto">{}</pre>'


class Panel:
    """Shows the table of a run during a training. At its end the last state stays."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, is_in_cell: Callable[[], bool]) -> None:
        """Called when a training begins. `is_in_cell` returns False once the running cell has ended."""
        self.end()
        self._stop.clear()
        # The context of the main thread assigns the output to this cell.
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
        from IPython.display import display

        overview, handle = Overview(self._run), None
        is_over = False
        while not is_over:
            is_over = self._stop.wait(_EVERY_S) or not is_in_cell()
            look = overview.look()
            # A training that is not steered has no phases, and one of less than a second needs no table.
            has_begun = any(row.beat.phase != Phase.SCRIPT for row in look.rows)
            if handle is None and has_begun and not is_over:
                handle = display(bundle(look), raw=True, display_id=True)
            elif handle is not None:
                handle.update(bundle(look), raw=True)


def bundle(look: Look) -> dict[str, str]:
    """Returns the table as a MIME bundle: as text and as the same text in HTML."""
    text = "\n".join([headline(look), *table_of(look, _WIDTH)])
    return {"text/plain": text, "text/html": _HTML.format(html.escape(text))}
