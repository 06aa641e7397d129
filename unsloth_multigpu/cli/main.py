"""The command `unsloth-multigpu`: `run`, and the commands of the tools."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from unsloth_multigpu.cli.command import HELP_ALL, Arguments, Command, usage_of
from unsloth_multigpu.cli.program_lookup import find_program
from unsloth_multigpu.errors import ConfigError, MultiGPUError
from unsloth_multigpu.logs import tell
from unsloth_multigpu.option_type import Option, did_you_mean, flag
from unsloth_multigpu.options import ENV_CONFIG, MultiGPUConfig, variable
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.wire.run import SCRIPT_MODULE

# In the order of `--help`.
_TOOLS = ("top", "verify", "plan", "forecast", "doctor", "bench", "chaos")


@dataclass(frozen=True)
class RunOptions(Arguments):
    """Runs a script as if its first line were enable_multi_gpu(). Each option is also the variable
    UNSLOTH_MULTIGPU_<NAME>; docs/options.md describes each.

    Args:
        config: YAML file with options, one `name: value` per line; also the variable UNSLOTH_MULTIGPU_CONFIG. Options
            on the command line and variables override it.
    """

    config: Annotated[str | None, Option(shown="FILE")] = None


def run(own: RunOptions, given: Mapping[str, Any], program: Sequence[str]) -> NoReturn:
    """Becomes `program`, with `enable_multi_gpu()` before its first line."""
    if own.config is not None:
        # The absolute path, because the script may change the working folder before enable_multi_gpu().
        os.environ[ENV_CONFIG] = os.path.abspath(own.config)
    MultiGPUConfig.resolve(given)  # Errors name the option as it was given here.
    os.environ.update({variable(name): str(value) for name, value in given.items() if value is not None})
    command = [sys.executable, "-m", SCRIPT_MODULE, *program]
    for stream in (sys.stdout, sys.stderr):
        print(end="", file=stream, flush=True)  # `file=None` is allowed: the command may have no stdout.
    os.execv(command[0], command)


_RUN = Command("run", "run a script without enable_multi_gpu() on every GPU", RunOptions, run, runs_program=True)


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line like a wrong argument of `enable_multi_gpu`: with the exit code of ConfigError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        error = ConfigError(message, hint=f"See {self.prog} --help.")
        self.exit(error.exit_code, f"error: {error}\n")


def find_commands() -> dict[str, Command]:
    """Returns `run` and the commands of the installed tools, by name."""
    folder = Path(__file__).parents[1] / "tools"
    names = [name for name in _TOOLS if (folder / name).is_dir()]
    tools = [importlib.import_module(f"unsloth_multigpu.tools.{name}.{name}_command").COMMAND for name in names]
    return {command.name: command for command in (_RUN, *tools)}


def make_parser(commands: Mapping[str, Command], *, shows_all: bool = False) -> Parser:
    """Creates the parser of the whole command line, with all options of a command in its help if `shows_all`."""
    parser = Parser(prog="unsloth-multigpu", description="One-GPU training scripts on every GPU.")
    version = installed_version("unsloth-multigpu") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"unsloth-multigpu {version}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="{" + ",".join(commands) + "}", parser_class=Parser
    )
    for name, command in commands.items():
        usage = usage_of(name) if command.runs_program else None
        own = subparsers.add_parser(name, help=command.help, description=command.description, usage=usage)
        command.add_options(own, shows_all=shows_all)
    return parser


def main(argv: Sequence[str] | None = None) -> int | None:
    """Runs one command line, None = `sys.argv[1:]`, and returns its exit code; `run` does not return."""
    commands = find_commands()
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(commands, shows_all=HELP_ALL in given)
    if not given:
        parser.print_help()
        return 0
    own, program = split_program(given)
    try:
        if given[0] not in commands and not given[0].startswith("-"):
            meant = did_you_mean(given[0], {name: name for name in commands})
            raise ConfigError(f"there is no command {given[0]!r}.", hint=f"{meant}Commands: {', '.join(commands)}.")
        parsed, unknown = parser.parse_known_args(own)
        command = commands[parsed.command]
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
        print(f"error: {error}", file=sys.stderr)
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
    command = find_commands().get(arguments[0]) if arguments else None
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


if __name__ == "__main__":
    sys.exit(main())
