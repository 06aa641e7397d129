"""Completion of commands and options in a shell, by argcomplete, which asks this program for each TAB."""

from __future__ import annotations

import argparse

from unsloth_multigpu.errors import SetupError

SHELLS = ("bash", "zsh", "fish")
# Set by the shell where it asks.
COMPLETES = "_ARGCOMPLETE"
_PROGRAM = "unsloth-multigpu"


def print_completion(shell: str) -> None:
    """Prints the lines that a shell has to read.

    Raises:
        SetupError: argcomplete is not installed.
    """
    try:
        import argcomplete
    except ImportError:
        raise SetupError(
            f"--completion {shell} is done by argcomplete, which is not installed.", hint="pip install argcomplete"
        ) from None
    print(argcomplete.shellcode([_PROGRAM], True, shell), end="")


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers the shell and ends this process. Behind a command it completes files, too: the shell's own way."""
    import argcomplete

    argcomplete.autocomplete(parser)
