"""Finds the Python program in a command line: a file, a module, or a command such as `trl sft`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from unsloth_multigpu.cli.command import usage_of
from unsloth_multigpu.errors import ConfigError

# Commands and modules that start processes and train in them.
_LAUNCHERS = re.compile(r"accelerate(-launch)?|axolotl|deepspeed|llamafactory-cli|lmf|ray|swift|torchrun|tune")
_LAUNCHER_MODULES = re.compile(
    r"accelerate\.commands\.(launch|accelerate_cli)|deepspeed(\.launcher\.runner)?|torch\.distributed\.(launch|run)"
)
# Commands of LLaMA-Factory, and its module that trains without starting a launcher.
_LLAMAFACTORY, _LLAMAFACTORY_MODULE = ("llamafactory-cli", "lmf"), "llamafactory.launcher"
# Options of `trl` for the launcher that it starts.
_OF_LAUNCHER = ("--num_processes", "--accelerate_config")


def find_program(program: Sequence[str], command: str) -> list[str]:
    """Returns arguments for `python`: `-m module ...` or `file ...`.

    A name that is not a file is looked up beside the running interpreter, then on PATH. `command` is the name of our
    command, for messages.

    Raises:
        ConfigError: No program was given, it does not exist, or is a launcher of processes.
    """
    usage = f"usage: {usage_of(command)}"
    if not program or (program[0] == "-m" and len(program) == 1):
        what = "module" if program else "script"
        raise ConfigError(f"{command}: no {what} was given.", hint=f"Write it after the options.\n{usage}")
    name, *arguments = program
    if name == "-m" and _LAUNCHER_MODULES.fullmatch(arguments[0]):
        raise _starts_processes(arguments[0], command)
    if name != "-m" and Path(name).is_dir():
        raise ConfigError(f"{command}: {name!r} is a folder; expected a script.", hint="A package is run with -m.")
    is_here = Path(name).exists()
    if name == "-m" or (is_here and (os.sep not in name or name.endswith(".py"))):
        return list(program)
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = name if is_here else shutil.which(name, path=places)
    if found is None:
        raise ConfigError(
            f"{command}: there is no file {name!r}.",
            hint=f"Check the path. There is no command of this name on PATH, either.\n{usage}",
        )
    started = Path(found).name
    if started in _LLAMAFACTORY and arguments[:1] == ["train"]:
        return ["-m", _LLAMAFACTORY_MODULE, *arguments[1:]]
    if _LAUNCHERS.fullmatch(started):
        raise _starts_processes(started, command)
    if started == "trl" and arguments and _has_script(arguments[0]):
        return _script_of_trl(arguments, command)
    return [found, *arguments]


def _starts_processes(launcher: str, command: str) -> ConfigError:
    return ConfigError(
        f"{launcher} starts processes of its own, so each rank would start the whole training again.",
        hint=f"Run the script or module that trains: unsloth-multigpu {command} train.py ...",
    )


def _script_of_trl(arguments: Sequence[str], command: str) -> list[str]:
    """Returns the script of a trl command: `trl sft` itself would start `accelerate launch`."""
    if given := [text for text in arguments if text.partition("=")[0] in _OF_LAUNCHER]:
        raise ConfigError(
            f"{given[0]} is an option of the launcher that trl starts, and the ranks are started here.",
            hint=f"Leave it out; set the number of ranks before trl: {command} --num-gpus 2 trl {arguments[0]} ...",
        )
    return ["-m", f"trl.scripts.{arguments[0]}", *arguments[1:]]


def _has_script(name: str) -> bool:
    spec = importlib.util.find_spec("trl")
    folders = (spec.submodule_search_locations if spec else None) or ()
    return any((Path(folder) / "scripts" / f"{name}.py").is_file() for folder in folders)
