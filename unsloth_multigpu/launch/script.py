"""How was this process started? By a command line, which can be run again, or by multiprocessing.

Data loaders and `Dataset.map` start helpers. They may import the script, whose `enable_multi_gpu()` must then do
nothing. `torch.multiprocessing.spawn` starts ranks, also for accelerate's `notebook_launcher` and Lightning.

Needs no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import read_identity

_SPAWN = "torch.multiprocessing.spawn"


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


def is_helper() -> bool:
    """True in a helper process of multiprocessing, which is not a rank and starts none.

    A rank has opened a process group, or `torch.multiprocessing.spawn` has called its function.

    Raises:
        SetupError: This is one of several ranks, but its variables do not say which.
        LaunchError: The variables contradict each other or are incomplete.
    """
    # While a spawned process imports the script, multiprocessing has set `_inheriting`, and not yet the parent.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return True
    if multiprocessing.parent_process() is None:
        return False
    loading = sys.modules.get("torch.utils.data")
    if loading is not None and loading.get_worker_info() is not None:
        return True
    dist = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    is_spawned = any(frame.f_globals.get("__name__") == _SPAWN for frame, _ in traceback.walk_stack(None))
    # This package starts ranks as commands, so any process that they spawn is a helper.
    if not (has_group or is_spawned) or RunContext.read(os.environ).run_dir is not None:
        return True
    own = read_identity(os.environ)
    if own is None or own.world_size == 1:
        raise SetupError(
            "This process is one of several that multiprocessing has started, but its variables do not say which rank "
            "it is.",
            hint="Before this call set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or start the script "
            "with `python train.py` and without spawn: enable_multi_gpu() starts the ranks.",
        )
    return False
