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
    are kept as they were given.

    Args:
        orig_argv: `sys.orig_argv`.
        main: The module `__main__`.
        executable: `sys.executable`.

    Raises:
        SetupError: The program cannot be started again: IPython at a terminal, a prompt, a script from standard input.
    """
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        raise SetupError(
            "enable_multi_gpu() cannot start ranks from IPython at a terminal: what is typed there is not a command "
            "that can run twice, and there is no Jupyter kernel that could become rank 0.",
            hint="Use a notebook (`jupyter lab`), or run a script with `python train.py`, or set num_gpus=1.",
        )
    arguments = list(orig_argv[1:])
    position, is_code = _find_program(arguments)
    if is_code:
        return [executable, *arguments]
    main_file = getattr(main, "__file__", None)
    if position is None or main_file is None or not _is_on_disk(main_file):
        raise SetupError(
            "enable_multi_gpu() cannot start this program again: it was typed at a prompt or piped into Python.",
            hint="Save it to a file and run `python train.py`.",
        )
    if not _is_program(arguments[position], main_file):
        # The script changed its folder before the line; only the absolute name still finds it.
        arguments[position] = os.path.abspath(main_file)
    return [executable, *arguments]


def _find_program(arguments: Sequence[str]) -> tuple[int | None, bool]:
    """Where the interpreter's own options end: the index of the script; None without a script; True for -c and -m."""
    skip = False
    for i, argument in enumerate(arguments):
        if skip:
            skip = False
        elif argument == "-" or not argument.startswith("-"):
            return (None if argument == "-" else i), False
        elif argument.startswith("--"):
            skip = argument == "--check-hash-based-pycs"
        else:
            # Letters can be joined: -Bc CODE, -um pkg, -Xdev. What takes a value ends the group.
            for j, letter in enumerate(argument[1:], start=1):
                if letter in "cm":
                    return None, True
                if letter in "WX":
                    skip = j == len(argument) - 1
                    break
    return None, False


def _is_on_disk(main_file: str) -> bool:
    """False for pipes and streams, which are empty when they are read a second time."""
    resolved = Path(main_file).resolve()
    return (resolved.is_file() or resolved.parent.exists()) and resolved.parts[1:2] not in (("dev",), ("proc",))


def _is_program(argument: str, main_file: str) -> bool:
    """True if `argument`, from the current folder, is still the program: its file, or the folder or zip around it."""
    path = Path(argument).resolve()
    return path.exists() and (path == Path(main_file).resolve() or path == Path(main_file).resolve().parent)
