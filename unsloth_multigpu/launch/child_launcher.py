"""Commands that start launchers of processes: each rank would start the whole training again, into one folder.

Needs no torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import SetupError

# Commands that start processes and train in them.
LAUNCHERS = frozenset(
    ["accelerate", "accelerate-launch", "axolotl", "deepspeed", "llamafactory-cli", "ray", "swift", "torchrun", "tune"]
)
LAUNCHER_MODULES = frozenset(
    [
        "accelerate.commands.accelerate_cli",
        "accelerate.commands.launch",
        "deepspeed.launcher.runner",
        "torch.distributed.launch",
        "torch.distributed.run",
    ]
)
# Which of them a script starts to train, and which have other commands than "launch".
_STARTED = frozenset(["accelerate", "accelerate-launch", "deepspeed", "torchrun"])
_WITH_COMMANDS = ("accelerate", "accelerate.commands.accelerate_cli")
# By these a process knows that torch elastic, or accelerate in the rank itself, has started it.
_OF_LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")


def is_launch(words: Sequence[str]) -> bool:
    """True for a command line that starts a launcher, by its name or as a module or file of Python."""
    rest = [word for word in words if not re.match(r"(?!-)\w+=", word)]
    name = Path(rest[0]).name if rest else ""
    if name.startswith("python"):
        rest = rest[1:]
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[2 if rest[0] in ("-X", "-W") else 1 :]
        rest = rest[1:] if rest[:1] == ["-m"] else rest
        name = Path(rest[0]).name if rest else ""
    if name not in _STARTED | LAUNCHER_MODULES:
        return False
    return name not in _WITH_COMMANDS or "launch" in rest[1:2]


def is_launched_again(command: object, child: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """True if a command would train in processes that take this rank's place for theirs.

    Args:
        command: As `subprocess.Popen` takes it.
        child: The variables that it gets. One without those of a rank is meant to be no part of the run.
        own: Those of this process.
    """
    if not {"RANK", "WORLD_SIZE"} <= child.keys():
        return False
    return is_launch(_words(command)) or any(name in child and name not in own for name in _OF_LAUNCHED)


def refuse_launcher(command: object, variables: Mapping[Any, Any] | None) -> None:
    """Refuses a command that this rank is about to start.

    Args:
        command: As `subprocess.Popen` takes it.
        variables: Those that it gets; None = those of this process.

    Raises:
        SetupError: It would train the whole run again.
    """
    child = os.environ if variables is None else {str(name): str(value) for name, value in variables.items()}
    if not is_launched_again(command, child, os.environ):
        return
    words = _words(command)
    script = next((word for word in words if word.endswith(".py")), "train.py")
    raise SetupError(
        f"This rank is about to start {' '.join(words)[:200]!r}: a launcher in each rank would train the whole run "
        "again.",
        hint=f"Let the ranks themselves run what is launched: unsloth-multigpu run {script} ... A helper that is to "
        "run beside them gets an environment without RANK and WORLD_SIZE.",
    )


def _words(command: object) -> list[str]:
    if isinstance(command, (str, bytes)):
        text = os.fsdecode(command)
        try:
            return shlex.split(text)
        except ValueError:  # A quotation that the shell will complain about.
            return text.split()
    if isinstance(command, os.PathLike):
        return [os.fsdecode(command)]
    return [os.fsdecode(word) for word in command] if isinstance(command, Sequence) else []
