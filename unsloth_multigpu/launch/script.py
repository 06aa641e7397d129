"""The command that starts this very program again, for each way in which Python can be started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from unsloth_multigpu.errors import SetupError


def relaunch_command(orig_argv: Sequence[str], main: ModuleType, executable: str) -> list[str]:
    """Builds the command line of a rank from this process's own.

    `python train.py --args`, `python -m pkg.train`, `python -c "..."` and interpreter options (`-X dev`, `-W error`)
    come back as they were given.

    Args:
        orig_argv: `sys.orig_argv`.
        main: The module `__main__`.
        executable: `sys.executable`.

    Raises:
        SetupError: The program cannot be started again: a notebook, a prompt, or a script from standard input.
    """
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        raise SetupError(
            "enable_multi_gpu() cannot start ranks from a notebook: a notebook is not a command that can run twice.",
            hint="Export it (jupyter nbconvert --to script) and run the script, or set num_gpus=1.",
        )
    arguments = list(orig_argv[1:])
    position = _program_position(arguments)
    is_command = position is not None and arguments[position] in ("-c", "-m")
    main_file = getattr(main, "__file__", None)
    if position is None or (not is_command and (arguments[position] == "-" or main_file is None)):
        raise SetupError(
            "enable_multi_gpu() cannot start this program again: it was typed at a prompt or piped into Python.",
            hint="Save it to a file and run `python train.py`.",
        )
    if not is_command and not Path(arguments[position]).exists():
        # The script changed its folder before the line; only the absolute name still finds it.
        arguments[position] = os.path.abspath(str(main_file))
    return [executable, *arguments]


def _program_position(arguments: Sequence[str]) -> int | None:
    """Index of `-c`, `-m`, `-` or the script among the interpreter's arguments."""
    skip = False
    for i, argument in enumerate(arguments):
        if skip:
            skip = False
        elif argument in ("-c", "-m", "-") or not argument.startswith("-"):
            return i
        elif argument in ("-X", "-W", "--check-hash-based-pycs"):
            skip = True
    return None


def main() -> None:
    """`python -m unsloth_multigpu.launch.script train.py --args`: a rank of a script that has no line of its own.

    The program becomes `__main__` as under plain Python: for good, since spawned workers, threads and exit handlers
    look there after its last line, and before torch is imported, since dill keeps what `__main__` was then. The public
    functions of runpy give it back at the last line, and leave `__file__` relative.
    """
    import builtins
    import pkgutil
    import runpy
    from importlib.machinery import SourceFileLoader

    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if is_module else sys.argv[1:]
    path = os.path.abspath(sys.argv[0])
    program = sys.modules["__main__"] = ModuleType("__main__")
    vars(program).update(__builtins__=builtins, __cached__=None, __annotations__={})
    is_archive = not is_module and pkgutil.get_importer(path) is not None  # A folder or a zip file with a __main__.py.
    # `python -m` has put the working directory first, `python -P -m` nothing.
    has_folder = not getattr(sys.flags, "safe_path", False)
    if is_archive:
        sys.path[: int(has_folder)] = [path]
    elif not is_module and has_folder:
        sys.path[0] = os.path.dirname(os.path.realpath(path))

    from unsloth_multigpu.plugin import enable_multi_gpu

    enable_multi_gpu()
    try:
        if is_module or is_archive:
            # What the interpreter itself calls for -m; it runs the module in sys.modules["__main__"].
            run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]
            run_as_main(sys.argv[0] if is_module else "__main__", alter_argv=is_module)
        else:
            loader = SourceFileLoader("__main__", path)
            vars(program).update(__file__=path, __loader__=loader)
            exec(loader.source_to_code(loader.get_data(path), path), vars(program))
    except Exception as error:
        # As the interpreter ends a program, without the frames below the program's own.
        traceback = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
