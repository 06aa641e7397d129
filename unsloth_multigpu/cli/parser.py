"""The parser of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from unsloth_multigpu.cli.command import Command
from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.versions import installed_version


class Parser(argparse.ArgumentParser):
    """Ends a wrong command line as this package ends a wrong argument: with the exit code of ConfigError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        error = ConfigError(message, hint=f"{self.prog} --help lists what there is.")
        self.exit(error.exit_code, f"error: {error}\n")


def make_parser(commands: Mapping[str, Command]) -> Parser:
    """The parser of the whole command line.

    Args:
        commands: Name -> command, in the order of the list.
    """
    parser = Parser(prog="unsloth-multigpu", description="One-GPU training scripts on every GPU.")
    version = installed_version("unsloth-multigpu") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"unsloth-multigpu {version}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="{" + ",".join(commands) + "}", parser_class=Parser
    )
    for name, command in commands.items():
        usage = usage_of(name) if command.runs_program else None
        own = subparsers.add_parser(name, help=command.help, description=command.description, usage=usage)
        command.add_options(own)
    return parser


def usage_of(command: str) -> str:
    """How a command that runs a program is called."""
    return f"""unsloth-multigpu {command} [options] [--] train.py [arguments of train.py ...]
       unsloth-multigpu {command} [options] -m package.module [arguments of the module ...]"""
