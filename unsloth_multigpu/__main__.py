"""The command `unsloth-multigpu`: `run`, and the commands of the tools.

The program that a command runs may be a file, a module, or another command, such as `trl sft`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from unsloth_multigpu.cli.command import HELP_ALL, Arguments, Command, usage_of
from unsloth_multigpu.errors import ConfigError, MultiGPUError
from unsloth_multigpu.logs import tell
from unsloth_multigpu.option_type import Option, did_you_mean, flag
from unsloth_multigpu.options import ENV_CONFIG, MultiGPUConfig, variable
from unsloth_multigpu.tools.bench import bench_command
from unsloth_multigpu.tools.chaos import chaos_command
from unsloth_multigpu.tools.doctor import doctor_command
from unsloth_multigpu.tools.forecast import forecast_command
from unsloth_multigpu.tools.plan import plan_command
from unsloth_multigpu.tools.top import top_command
from unsloth_multigpu.tools.verify import verify_command
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.wire.run import SCRIPT_MODULE

# Commands and modules that start processes and train in them.
_LAUNCHERS = re.compile(r"accelerate(-launch)?|axolotl|deepspeed|llamafactory-cli|lmf|ray|swift|torchrun|tune")
_LAUNCHER_MODULES = re.compile(
    r"accelerate\.commands\.(launch|accelerate_cli)|deepspeed(\.launcher\.runner)?|torch\.distributed\.(launch|run)"
)
# Commands of LLaMA-Factory, and its module that trains without starting a launcher.
_LLAMAFACTORY, _LLAMAFACTORY_MODULE = ("llamafactory-cli", "lmf"), "llamafactory.launcher"
# Options of `trl` for the launcher that it starts.
_OF_LAUNCHER = ("--num_processes", "--accelerate_config")


@dataclass(frozen=True)
class RunOptions(Arguments):
    """Runs a script as if its first line were enable_multi_gpu(). Each option can also be set by the variable
    UNSLOTH_MULTIGPU_<NAME>; docs/options.md describes them.

    Args:
        config: YAML file with options, one `name: value` per line; can also be set by the variable
            UNSLOTH_MULTIGPU_CONFIG. Options on the command line and variables override it.
    """

    config: Annotated[str | None, Option(shown="FILE")] = None


def run(own: RunOptions, given: Mapping[str, Any], program: Sequence[str]) -> NoReturn:
    """Replaces this process by `program`, which runs after a call of `enable_multi_gpu()`."""
    if own.config is not None:
        # The absolute path, because the script may change the working folder before enable_multi_gpu().
        os.environ[ENV_CONFIG] = os.path.abspath(own.config)
    MultiGPUConfig.resolve(given)  # Errors name the option as it was given here.
    os.environ.update({variable(name): str(value) for name, value in given.items() if value is not None})
    command = [sys.executable, "-m", SCRIPT_MODULE, *program]
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the command was started without it.
        stream.flush()
    os.execv(command[0], command)


_RUN = Command("run", "run a script without enable_multi_gpu() on every GPU", RunOptions, run, runs_program=True)
# In the order of `--help`.
_TOOLS = (top_command, verify_command, plan_command, forecast_command, doctor_command, bench_command, chaos_command)
COMMANDS: dict[str, Command] = {command.name: command for command in (_RUN, *(tool.COMMAND for tool in _TOOLS))}


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line like a wrong argument of `enable_multi_gpu`: with the exit code of ConfigError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        error = ConfigError(message, hint=f"See {self.prog} --help.")
        self.exit(error.exit_code, f"error: {error}\n")


def make_parser(*, shows_all: bool = False) -> Parser:
    """Creates the parser of the whole command line, with all options of a command in its help if `shows_all`."""
    parser = Parser(prog="unsloth-multigpu", description="One-GPU training scripts on every GPU.")
    version = installed_version("unsloth-multigpu") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"unsloth-multigpu {version}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}", parser_class=Parser
    )
    for name, command in COMMANDS.items():
        usage = usage_of(name) if command.runs_program else None
        own = subparsers.add_parser(name, help=command.help, description=command.description, usage=usage)
        command.add_options(own, shows_all=shows_all)
    return parser


def main(argv: Sequence[str] | None = None) -> int | None:
    """Runs one command line, None = `sys.argv[1:]`, and returns its exit code; `run` does not return."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(shows_all=HELP_ALL in given)
    if not given:
        parser.print_help()
        return 0
    own, program = split_program(given)
    try:
        if given[0] not in COMMANDS and not given[0].startswith("-"):
            meant = did_you_mean(given[0], {name: name for name in COMMANDS})
            raise ConfigError(f"there is no command {given[0]!r}.", hint=f"{meant}Commands: {', '.join(COMMANDS)}.")
        parsed, unknown = parser.parse_known_args(own)
        command = COMMANDS[parsed.command]
        if unknown:
            flags = {each: each for each in map(flag, command.table())}
            hint = did_you_mean(unknown[0].partition("=")[0], flags)
            raise ConfigError(
                f"unrecognized arguments: {' '.join(unknown)}",
                hint=f"{hint}See unsloth-multigpu {command.name} --help.",
            )
        options, of_run = command.read(parsed)
        if command.runs_program:
            if program and len(own) + len(program) == len(given):  # Without `--` between them.
                _warn_of_options_after(program, command)
            program = find_program(program or options.program(), command.name)
        code = command.run(options, of_run, program)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except MultiGPUError as error:
        tell(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader, such as `head`, has ended. Python would fail again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the options of a command from the program, which begins with the script's name.

    Not left to argparse, which removes `-h` and `--` from the script's arguments in some versions of Python.
    """
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is None or not command.runs_program:
        return list(arguments), []
    take_value = {flag(name) for name, option in command.table().items() if option.type is not bool}
    i = 1
    while i < len(arguments) and arguments[i].startswith("-") and arguments[i] not in ("-m", "--"):
        i += 2 if arguments[i] in take_value else 1
    return list(arguments[:i]), list(arguments[i + 1 if arguments[i : i + 1] == ["--"] else i :])


def _warn_of_options_after(program: Sequence[str], command: Command) -> None:
    own = {flag(name) for name in command.table()}
    after = [text for text in program[1:] if text.partition("=")[0] in own]
    if after:
        where = f"unsloth-multigpu {command.name} {after[0]} ..."
        tell(
            f"unsloth_multigpu: {after[0]} comes after {program[0]}, so the script gets it. If it is meant for "
            f"{command.name}: {where}; if not, write -- before {program[0]}.\n"
        )


def find_program(program: Sequence[str], command: str) -> list[str]:
    """Returns arguments for `python`: `-m module ...` or `file ...`.

    A name that is not a file is looked up beside the running interpreter, then on PATH. `command` is the name of our
    command, for messages.

    Raises:
        ConfigError: No program was given, it does not exist, or it is a launcher of processes.
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


if __name__ == "__main__":
    sys.exit(main())
