"""Builds the command line that starts this program again."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from unsloth_multigpu.errors import SetupError


def relaunch_command(orig_argv: Sequence[str], main: ModuleType, executable: str) -> list[str]:
    """Builds the command line of a rank from `sys.orig_argv`, the module `__main__` and `sys.executable`.

    `python train.py --args`, `python -m pkg.train`, `python -c "..."` and interpreter options (`-X dev`, `-W error`)
    are kept as they were given.

    Raises:
        SetupError: The program cannot be started again: IPython or Python at a terminal, or a script from stdin.
    """
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        raise SetupError(
            "enable_multi_gpu() cannot start ranks from IPython at a terminal: typed input is not a command that ranks "
            "can run, and there is no Jupyter kernel that could become rank 0.",
            hint="Use a notebook (`jupyter lab`), or run a script with `python train.py`, or set num_gpus=1.",
        )
    arguments = list(orig_argv[1:])
    main_file = getattr(main, "__file__", None)
    # No file: code of -c, or a script that a module of this package runs.
    if main_file is None and any(re.match(r"-[A-Za-z]*[cm]", argument) for argument in arguments):
        return [executable, *arguments]
    # Pipes and streams cannot be read a second time.
    if main_file in (None, "<stdin>") or Path(main_file).resolve().parts[1:2] in (("dev",), ("proc",)):
        raise SetupError(
            "enable_multi_gpu() cannot start this program again: it was typed at a prompt or piped into Python.",
            hint="Save it to a file and run `python train.py`.",
        )
    place = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    is_script = place < len(arguments) and str(main_file).endswith(f"/{arguments[place]}")
    if is_script and Path(arguments[place]).resolve() != Path(main_file).resolve():
        # The script has changed the working folder, so its relative name is no longer valid.
        arguments[place] = os.path.abspath(main_file)
    return [executable, *arguments]
