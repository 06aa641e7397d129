"""The contract of a command: `unsloth-multigpu NAME`. `run` is one of ours, tools bring the others."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from unsloth_multigpu.option_type import CommandOption, flag

# Name -> what it is; a plain tuple has the type of the value, bool for a switch, and what it means.
OptionTable = Mapping[str, "CommandOption | tuple[type[Any], str]"]


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
        for name, entry in self.table().items():
            option = CommandOption(*entry)
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            _add_option(groups[option.group], name, option)

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
    words = f"{{{','.join(option.words)}}}" if option.words else ""
    shown = option.shown or words or option.kind.__name__.upper()
    # No `choices`: the rules of a run's options are those of its config, which says more about a wrong value.
    group.add_argument(flag(name), type=option.kind, metavar=shown, help=text)
