"""The command `unsloth-multigpu`: starts scripts that have no line of their own, and checks the machine."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from unsloth_multigpu.cli.command import Command, OptionTable
from unsloth_multigpu.cli.parser import make_parser
from unsloth_multigpu.cli.program_lookup import find_program
from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.logs import tell
from unsloth_multigpu.option_type import CommandOption, flag
from unsloth_multigpu.options import ENV_CONFIG, MultiGPUConfig, command_options, variable
from unsloth_multigpu.tool import tool_of
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import read_identity

RANK_MODULE = "unsloth_multigpu.cli.script_runner"
_CONFIG_HELP = (
    "YAML file with options of a run by their names, one `name: value` in a line; also the variable "
    "UNSLOTH_MULTIGPU_CONFIG. Options here and variables win over it, it wins over [tool.unsloth_multigpu] in the "
    "pyproject.toml of this folder or of one above."
)
# Their order in the list of commands; others that are found come behind.
_TOOLS = ("top", "verify", "plan", "forecast", "doctor", "bench", "chaos")


class RunCommand(Command):
    """`unsloth-multigpu run`."""

    name = "run"
    help = "run a script that has no line of its own on every GPU"
    description = (
        "Runs a script as if its first line were enable_multi_gpu(). Each option is also the variable "
        "UNSLOTH_MULTIGPU_<NAME>; `unsloth-multigpu doctor --options` says all about each."
    )
    runs_program = True

    def table(self) -> OptionTable:
        return {"config": CommandOption(str, _CONFIG_HELP, "FILE"), **command_options("run")}

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> NoReturn:
        if options.config is not None:
            # By its whole path, because the script may change the folder above its line.
            os.environ[ENV_CONFIG] = os.path.abspath(options.config)
        _run({name: getattr(options, name) for name in command_options("run")}, program)


def find_commands() -> dict[str, Command]:
    """`run`, and the command of each tool that is installed."""
    folder = Path(__file__).parents[1] / "tools"
    found = [module.name for module in pkgutil.iter_modules([str(folder)]) if module.ispkg]
    names = [*(n for n in _TOOLS if n in found), *(n for n in found if n not in _TOOLS)]
    tools = [importlib.import_module(f"unsloth_multigpu.tools.{name}").COMMAND for name in names]
    return {command.name: command for command in (RunCommand(), *tools)}


def main(argv: Sequence[str] | None = None) -> int | None:
    """Runs one command line and returns its exit code; `run` does not return.

    Args:
        argv: Arguments without the program's name; None = `sys.argv[1:]`.
    """
    commands = find_commands()
    parser = make_parser(commands)
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        parser.print_help()
        return 0
    own, program = split_program(given)
    try:
        options = parser.parse_args(own)
        command = commands[options.command]
        if command.runs_program:
            if program and len(own) + len(program) == len(given):  # No `--` says whose they are.
                _tell_of_options_behind(program, command)
            program = find_program(program or command.program_of(options), command.name)
        code = command.run(options, program)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except MultiGPUError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # `| head` has read enough. Python would fail once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Parts the options of a command from the program: from the script's name on all belongs to the script.

    Not left to argparse, which takes `-h` and `--` out of the script's arguments in some versions of Python.
    """
    command = find_commands().get(arguments[0]) if arguments else None
    if command is None or not command.runs_program:
        return list(arguments), []
    take_value = {flag(name) for name, (kind, *_) in command.table().items() if kind is not bool}
    i = 1
    while i < len(arguments) and arguments[i].startswith("-") and arguments[i] not in ("-m", "--"):
        i += 2 if arguments[i] in take_value else 1
    return list(arguments[:i]), list(arguments[i + 1 if arguments[i : i + 1] == ["--"] else i :])


def _run(given: Mapping[str, Any], program: Sequence[str]) -> NoReturn:
    from unsloth_multigpu.logs import Console
    from unsloth_multigpu.start import check_cluster, needs_supervisor, ranks_to_start, supervise

    config = tool_of(RunContext.read(os.environ)).adjusted(MultiGPUConfig.resolve(given))
    # By environment, so that a bare enable_multi_gpu() in the script asks for the same.
    os.environ.update({variable(name): str(value) for name, value in given.items() if value is not None})
    command = [sys.executable, "-m", RANK_MODULE, *program]
    Console()
    is_started = read_identity(os.environ) is not None  # By torchrun or srun: this process is one of the ranks.
    if not is_started:
        check_cluster(given)
    # Counting the devices takes an import of torch, so it is left to the rank where there can only be one.
    if not is_started and (config.num_gpus != 1 or needs_supervisor(config, 1)):
        num_ranks = ranks_to_start(config)
        if needs_supervisor(config, num_ranks):
            supervise(command, config, num_ranks)
    for stream in (sys.stdout, sys.stderr):
        print(end="", file=stream, flush=True)  # None where the command was started without it.
    os.execv(command[0], command)


def _tell_of_options_behind(program: Sequence[str], command: Command) -> None:
    own = {flag(name) for name in command.table()}
    behind = [text for text in program[1:] if text.partition("=")[0] in own]
    if behind:
        where = f"unsloth-multigpu {command.name} {behind[0]} ..."
        tell(
            f"unsloth_multigpu: {behind[0]} stands behind {program[0]}, so the script gets it. If it is meant for "
            f"{command.name}: {where}; if not, write -- before {program[0]}.\n"
        )


if __name__ == "__main__":
    sys.exit(main())
