"""Extensions of IPython: a worker loads those that the kernel has loaded, and reloads modules as the kernel does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unsloth_multigpu.notebook.cell import FRONT_ENDS, error_text


def extension_lines(shell: Any) -> list[str]:
    """Magics that give another shell the extensions of this one.

    Extensions that speak to a front end need a kernel, which a worker does not have.

    Args:
        shell: `get_ipython()`.
    """
    loaded = sorted(name for name in shell.extension_manager.loaded if not f"{name}.".startswith(FRONT_ENDS))
    return [*(f"%load_ext {name}" for name in loaded), *_autoreload(shell)]


def _autoreload(shell: Any) -> list[str]:
    """Without it an edited module would be reloaded on rank 0 alone, and the ranks would run different code."""
    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    reloaders = [] if magics is None else [v for v in vars(magics).values() if type(v).__name__ == "ModuleReloader"]
    if not reloaders or not reloaders[0].enabled:
        return []
    reloader = reloaders[0]
    return [f"%autoreload {2 + getattr(reloader, 'autoload_obj', False) if reloader.check_all else 1}"]


def run_lines(shell: Any, lines: Iterable[str]) -> list[str]:
    """Runs magics in a worker's shell; returns one text for each that fails. The others are run in any case."""
    failures = []
    for line in lines:
        result = shell.run_cell(line, store_history=False)
        if (error := result.error_in_exec or result.error_before_exec) is not None:
            failures.append(f"{line}: {error_text(error)}")
    return failures
