"""What a kernel has besides its cells: the files, lines and extensions of its profile, and what a front end has added.

A front end runs code of its own and of the user's settings without writing it down: VS Code names the notebook in
`__vsc_ipynb_file__` and runs `jupyter.runStartupCommands`. Without it a cell that works on rank 0 fails on a worker.
"""

from __future__ import annotations

import copy
import itertools
import json
import keyword
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from unsloth_multigpu.notebook.cell import FRONT_ENDS, as_literal, error_text
from unsloth_multigpu.notebook.expand import attribute

# Names of IPython, which each shell has, and a name that the debugger leaves behind.
_NOT_SENT = re.compile(r"_i*\d*|_+|_[iod]h|In|Out|debugpy")
# All of it goes into one environment variable, which may have 128 KiB on Linux.
_NAME_CHARACTERS = 2_000
_ALL_CHARACTERS = 60_000


def describe_shell(shell: Any, bound: Collection[str]) -> dict[str, Any]:
    """What a worker's shell needs to become like this one, as values that JSON can hold.

    Args:
        shell: `get_ipython()`.
        bound: Names that the cells so far have bound, which a worker runs again.
    """
    from IPython.core.shellapp import InteractiveShellApp

    app = getattr(shell.kernel, "parent", None)  # Other kernels than ipykernel have none.
    options: dict[str, Any] = {}
    if isinstance(app, InteractiveShellApp):
        options = {name: getattr(app, name) for name in InteractiveShellApp.class_trait_names(config=True)}
    # Only what rank 0 has loaded. Extensions that speak to a front end need a kernel, which a worker does not have.
    loaded = sorted(name for name in shell.extension_manager.loaded if not f"{name}.".startswith(FRONT_ENDS))
    return {
        "ipython_dir": shell.ipython_dir,
        "profile_dir": shell.profile_dir.location,
        "config": _plain_config(shell.config),
        "options": {**options, "extensions": loaded, "extra_extensions": []},
        "magics": _autoreload_magics(shell),
        "names": _names_to_send(shell.user_ns, bound),
    }


def _plain_config(config: Any) -> dict[str, Any]:
    """The sections of a configuration, without values that JSON cannot hold."""
    from traitlets.config import Config, LazyConfigValue

    plain: dict[str, dict[str, Any]] = {}
    for section, values in copy.deepcopy(config).items():
        for name, value in values.items() if isinstance(values, Config) else ():
            # `c.AliasManager.user_aliases.append(...)`
            known = value.get_value([]) if isinstance(value, LazyConfigValue) else value
            try:
                text = json.dumps(known)
            except (TypeError, ValueError):
                continue  # Functions and classes belong to the front end.
            plain.setdefault(section, {})[name] = json.loads(text)
    return plain


def _autoreload_magics(shell: Any) -> list[str]:
    """Magics that make another shell reload changed modules as this one does, so that ranks run the same code."""
    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    found = [] if magics is None else [v for v in vars(magics).values() if type(v).__name__ == "ModuleReloader"]
    if not found:
        return []
    reloader = found[0]
    mode = 0 if not reloader.enabled else 1 if not reloader.check_all else 2 + getattr(reloader, "autoload_obj", False)
    skipped = [f"%aimport -{name}" for name in reloader.skip_modules]
    chosen = [f"%aimport {name}" for name in reloader.modules if mode == 1 and name in _early_modules()]
    return [*skipped, *chosen, f"%autoreload {mode}"]


def _names_to_send(values: Mapping[str, Any], bound: Collection[str]) -> dict[str, str]:
    """For each name that no cell has bound: the line of Python that binds it in another process."""
    names: dict[str, str] = {}
    num_characters, early = 0, _early_modules()
    for name, value in values.items():
        if name in bound or _NOT_SENT.fullmatch(name) or not name.isidentifier() or keyword.iskeyword(name):
            continue
        line = _binding(name, value, early)
        size = len(json.dumps([name, line]))  # JSON writes a Chinese character as six.
        if line and size <= min(_NAME_CHARACTERS, _ALL_CHARACTERS - num_characters):
            names[name] = line
            num_characters += size
    return names


def _binding(name: str, value: Any, early: Collection[str]) -> str:
    """The line of Python that binds a name to this value; "" if another process cannot make the value."""
    if isinstance(value, ModuleType):
        module = value.__name__
        return f"import {module} as {name}" if module in early and sys.modules[module] is value else ""
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        module, own = value.__module__, value.__qualname__
        is_found = module in early and own.isidentifier() and getattr(sys.modules[module], own, None) is value
        return f"from {module} import {own} as {name}" if is_found else ""
    literal = as_literal(value)
    return "" if literal is None else f"{name} = {literal}"


def _early_modules() -> Collection[str]:
    """Modules that were imported before Unsloth. A worker also imports Unsloth before what Unsloth changes."""
    return {*itertools.takewhile(lambda name: name != "unsloth", list(sys.modules))} - {"__main__"}


def shell_options(told: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by which a worker's shell gets the configuration and the profile of the kernel's.

    Args:
        told: What `describe_shell` gave.
    """
    from IPython.core.profiledir import ProfileDir
    from traitlets.config import Config

    settings = Config(told["config"])
    settings.HistoryManager.enabled = False
    # IPython keeps each traceback as text; other modes take seconds for one traceback.
    settings.InteractiveShell.xmode = "Minimal"
    # Its log file is rank 0's, and a worker has no prompt for a debugger.
    settings.InteractiveShell.update(logstart=False, logfile="", logappend="", pdb=False)
    return {
        "config": settings,
        "ipython_dir": told["ipython_dir"],
        "profile_dir": ProfileDir.find_profile_dir(told["profile_dir"]),
        "user_module": sys.modules["__main__"],
    }


def start_alike(shell: Any, told: Mapping[str, Any]) -> list[str]:
    """Does in a worker's shell what the kernel did before its first cell.

    Args:
        shell: The worker's shell.
        told: What `describe_shell` gave.

    Returns:
        One entry for each failure. As in a kernel, the other steps are done in any case.
    """
    from IPython.core.shellapp import InteractiveShellApp

    notes = _Notes()

    class StartUp(InteractiveShellApp):  # type: ignore[misc, unused-ignore]
        """IPython's own code that gives a shell what its profile says."""

        log = notes.log
        profile_dir = shell.profile_dir
        ipython_dir = shell.ipython_dir
        extra_args: list[str] = []  # noqa: RUF012

    with notes.of_errors_in(shell):
        start_up = StartUp(**told["options"])
        start_up.shell = shell
        start_up.init_gui_pylab()
        start_up.init_extensions()
        start_up.init_code()
        # A name that a startup file or an extension has bound is kept.
        lines = [line for name, line in told["names"].items() if name not in shell.user_ns]
        for line in [*told["magics"], *lines]:
            notes.log.info(line)
            shell.run_cell(line, store_history=False)
    return notes.failures


class _Notes(logging.Handler):
    """Reads what IPython logs while it starts: it only logs what fails.

    Attributes:
        failures: What has failed, and in which step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []
        self._step = ""
        self.log = logging.Logger(__name__, logging.INFO)
        self.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Takes one message."""
        if record.levelno == logging.INFO:
            self._step = record.getMessage()
        elif record.exc_info:
            self._fail(record.exc_info[1])

    @contextmanager
    def of_errors_in(self, shell: Any) -> Iterator[None]:
        """Notes the errors that the shell shows."""
        with ExitStack() as stack:
            for name in ("showtraceback", "showsyntaxerror", "showindentationerror"):
                stack.enter_context(attribute(shell, name, self._noted(getattr(shell, name))))
            yield

    def _noted(self, show: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> None:
            self._fail(sys.exc_info()[1])
            show(*args, **kwargs)

        return noted

    def _fail(self, error: BaseException | None) -> None:
        self.failures.append(f"{self._step}: {error_text(error)}")
