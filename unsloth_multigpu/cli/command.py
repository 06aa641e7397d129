"""The contract of a command: `unsloth-multigpu NAME`. `run` is one of ours, tools bring the others."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.option_type import Option, flag, options_of, take_values
from unsloth_multigpu.options import EVERYDAY, command_options

if TYPE_CHECKING:
    from typing_extensions import Self

HELP_ALL = "--help-all"


@dataclass(frozen=True)
class Arguments:
    """The base of a dataclass of a command's own options, which are checked when it is made; see `option_type`."""

    def __post_init__(self) -> None:
        take_values(self)

    @classmethod
    def table(cls) -> dict[str, Option]:
        """The options by their names, as a command line has them."""
        return {name: option for name, option in options_of(cls).items() if option.commands}

    @classmethod
    def read(cls, given: argparse.Namespace) -> Self:
        """What a command line gave; None = the default.

        Raises:
            ConfigError: A value that cannot be used.
        """
        values = {name: getattr(given, name) for name in cls.table()}
        return cls(**{name: value for name, value in values.items() if value is not None})

    def program(self) -> list[str]:
        """What is run where no program is given; empty = one has to be."""
        return []


@dataclass(frozen=True)
class Command:
    """One command. A tool is found by the attribute `COMMAND` of its package in `unsloth_multigpu.tools`.

    Args:
        name: On the command line.
        help: One line, in the list of commands.
        description: In its own `--help`.
        module: Imported where the command is called, or its options are listed. It has `Options`, a class of
            `Arguments`; `run(own, given, program)`, which returns the exit code; and `DEFAULTS`, where an option of a
            run has another default there.
        runs_program: A script or a module follows its options.
        has_options_of_run: It takes those options of a run whose `commands` name it.
        operand: The option that is given without its name.
    """

    name: str
    help: str
    description: str
    module: str
    runs_program: bool = False
    has_options_of_run: bool = False
    operand: str = ""

    def table(self) -> dict[str, Option]:
        """Its own options, and those of a run."""
        own: dict[str, Option] = self._imported().Options.table()
        return {**own, **self._of_run()}

    def add_options(self, parser: argparse.ArgumentParser, *, shows_all: bool) -> None:
        """Adds its options to its parser.

        Args:
            parser: Of this command.
            shows_all: Its help lists all options; else, of a run's, the everyday ones.
        """
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        rest = {name for name, option in self._of_run().items() if option.group != EVERYDAY}
        if rest:
            parser.add_argument(HELP_ALL, action="help", help=f"list all options, {len(rest)} more, and exit")
        for name, option in self.table().items():
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            is_shown = shows_all or name not in rest
            _add_option(groups[option.group], name, option, is_operand=name == self.operand, is_shown=is_shown)

    def read(self, options: argparse.Namespace) -> tuple[Arguments, dict[str, Any]]:
        """Its own options, checked, and what the command line gave of a run's; None = not given.

        Raises:
            ConfigError: A value that cannot be used.
        """
        return self._imported().Options.read(options), {name: getattr(options, name) for name in self._of_run()}

    def run(self, own: Arguments, given: Mapping[str, Any], program: Sequence[str]) -> int:
        """Runs it and returns its exit code.

        Args:
            own: See `read`.
            given: See `read`.
            program: The script and its arguments, or `-m`, a module and its arguments.
        """
        return int(self._imported().run(own, given, program))

    def _imported(self) -> Any:
        return importlib.import_module(self.module)

    def _of_run(self) -> dict[str, Option]:
        if not self.has_options_of_run:
            return {}
        return command_options(self.name, getattr(self._imported(), "DEFAULTS", None))


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
        # No `choices`: the rules of a run's options are those of its config, which says more about a wrong value.
        kind = str if option.check else option.type
        group.add_argument(flag(name), type=kind, metavar=option.metavar(), help=text)


def usage_of(command: str) -> str:
    """How a command that runs a program is called."""
    return f"""unsloth-multigpu {command} [options] [--] train.py [arguments of train.py ...]
       unsloth-multigpu {command} [options] -m package.module [arguments of the module ...]"""
