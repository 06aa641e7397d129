"""The interface of a command `unsloth-multigpu NAME`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.option_type import Option, flag, options_of, take_values
from unsloth_multigpu.options import EVERYDAY, command_options

if TYPE_CHECKING:
    from typing_extensions import Self

HELP_ALL = "--help-all"


@dataclass(frozen=True)
class Arguments:
    """Base of a dataclass with a command's own options; see `option_type`. Its docstring describes the command."""

    def __post_init__(self) -> None:
        take_values(self)

    @classmethod
    def table(cls) -> dict[str, Option]:
        """Returns the options of the command line by name."""
        return {name: option for name, option in options_of(cls).items() if option.commands}

    @classmethod
    def read(cls, given: argparse.Namespace) -> Self:
        """Creates the options from a parsed command line, in which None means the default.

        Raises:
            ConfigError: An invalid value.
        """
        values = {name: getattr(given, name) for name in cls.table()}
        return cls(**{name: value for name, value in values.items() if value is not None})

    def program(self) -> list[str]:
        """Returns the program to run if none is given; empty = a program is required."""
        return []


@dataclass(frozen=True)
class Command:
    """One command. Each package of `unsloth_multigpu.tools` has an attribute `COMMAND` in its module `<name>_command`.

    Args:
        name: Name on the command line.
        help: One line for the list of commands.
        options: Its own options. The first paragraph of the docstring is the text of its own `--help`.
        run: Runs the command with the options of `read` and the program, which is the script and its arguments, or
            `-m`, a module and its arguments. Returns the exit code.
        runs_program: A script or module follows its options.
        defaults: Its own defaults for options of a run.
        operand: The option that is given without its name.
    """

    name: str
    help: str
    options: type[Arguments]
    run: Callable[[Any, Mapping[str, Any], Sequence[str]], int]
    runs_program: bool = False
    defaults: Mapping[str, Any] | None = None
    operand: str = ""

    @property
    def description(self) -> str:
        """Text of its own `--help`."""
        return " ".join(str(inspect.getdoc(self.options)).partition("\n\n")[0].split())

    def table(self) -> dict[str, Option]:
        """Returns its own options and those of a run, by name."""
        return {**self.options.table(), **command_options(self.name, self.defaults)}

    def add_options(self, parser: argparse.ArgumentParser, *, shows_all: bool) -> None:
        """Adds its options to its parser, whose help lists all options of a run only if `shows_all`."""
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        rest = {name for name, option in command_options(self.name).items() if option.group != EVERYDAY}
        if rest:
            parser.add_argument(HELP_ALL, action="help", help=f"list all options, {len(rest)} more, and exit")
        for name, option in self.table().items():
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            is_shown = shows_all or name not in rest
            _add_option(groups[option.group], name, option, is_operand=name == self.operand, is_shown=is_shown)

    def read(self, options: argparse.Namespace) -> tuple[Arguments, dict[str, Any]]:
        """Returns its own options, checked, and the values of a run's options; None = not given.

        Raises:
            ConfigError: An invalid value.
        """
        return self.options.read(options), {name: getattr(options, name) for name in command_options(self.name)}


def _add_option(
    group: argparse._ActionsContainer, name: str, option: Option, *, is_operand: bool, is_shown: bool
) -> None:
    text = f"{option.help} [{option.usual()}]".replace("%", "%%") if is_shown else argparse.SUPPRESS
    if is_operand:
        group.add_argument(name, nargs="?", metavar=option.metavar(), help=text)
    elif option.type is bool:
        action = "store_true" if name.startswith("no_") else argparse.BooleanOptionalAction
        group.add_argument(flag(name), action=action, help=text)
    else:
        # Without `choices`: the config checks options of a run, and its errors are better than argparse's.
        kind = str if option.check else option.type
        group.add_argument(flag(name), type=kind, metavar=option.metavar(), help=text)


def usage_of(command: str) -> str:
    """Returns the usage of a command that runs a program."""
    return f"""unsloth-multigpu {command} [options] [--] train.py [arguments of train.py ...]
       unsloth-multigpu {command} [options] -m package.module [arguments of the module ...]"""
