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
    """`python -m unsloth_multigpu.launch.script train.py --args`: a rank of a script that has no line of its own."""
    import runpy

    from unsloth_multigpu.plugin import enable_multi_gpu

    target = sys.argv[1:]
    enable_multi_gpu()
    if target[0] == "-m":
        sys.argv = target[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = target
        sys.path[0] = str(Path(target[0]).resolve().parent)
        runpy.run_path(target[0], run_name="__main__")


if __name__ == "__main__":
    main()
