"""The contract of a command: `unsloth-multigpu NAME`. `run` is one of ours, tools bring the others."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unsloth_multigpu.option_type import CommandOption, flag, options_of, take_values

if TYPE_CHECKING:
    from typing_extensions import Self

OptionTable = Mapping[str, CommandOption]


@dataclass(frozen=True)
class Arguments:
    """The base of a dataclass of a command's own options, which are checked when it is made; see `option_type`."""

    def __post_init__(self) -> None:
        take_values(self)

    @classmethod
    def table(cls) -> dict[str, CommandOption]:
        """The options by their names, as a command line has them."""
        return {
            name: option.on_command_line("" if option.default is False else option.usual())
            for name, option in options_of(cls).items()
            if option.commands
        }

    @classmethod
    def read(cls, given: argparse.Namespace) -> Self:
        """What a command line gave; None = the default.

        Raises:
            ConfigError: A value that cannot be used.
        """
        values = {name: getattr(given, name) for name in cls.table()}
        return cls(**{name: value for name, value in values.items() if value is not None})


class Command:
    """One command. A tool is found by the attribute `COMMAND` of its package in `unsloth_multigpu.tools`.

    Attributes:
        name: On the command line.
        help: One line, in the list of commands.
        description: In its own `--help`.
        runs_program: A script or a module follows its options.
    """

    name: str
    help: str
    description: str
    runs_program = False

    def table(self) -> OptionTable:
        """Its options, where they are given as a table."""
        return {}

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds its options to its parser."""
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        for name, option in self.table().items():
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            _add_option(groups[option.group], name, option)

    def program_of(self, options: argparse.Namespace) -> list[str]:
        """What is run where no program is given; empty = one has to be."""
        return []

    def run(self, options: argparse.Namespace, program: Sequence[str]) -> int:
        """Runs it and returns its exit code.

        Args:
            options: What the command line gave; None = not given.
            program: The script and its arguments, or `-m`, a module and its arguments.
        """
        raise NotImplementedError


def _add_option(group: argparse._ActionsContainer, name: str, option: CommandOption) -> None:
    text = option.text.replace("%", "%%")
    if option.kind is bool:
        action = "store_true" if name.startswith("no_") else argparse.BooleanOptionalAction
        group.add_argument(flag(name), action=action, help=text)
        return
    # No `choices`: the rules of a run's options are those of its config, which says more about a wrong value.
    group.add_argument(flag(name), type=option.kind, metavar=option.shown, help=text)
