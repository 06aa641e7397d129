"""Refuses launchers such as torchrun as child processes of a rank: every rank would start the whole training again.

Needs no torch.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.seam import instance_attribute

# Commands that start processes and train in them.
LAUNCHERS = frozenset(
    [
        "accelerate",
        "accelerate-launch",
        "axolotl",
        "deepspeed",
        "llamafactory-cli",
        "lmf",
        "ray",
        "swift",
        "torchrun",
        "tune",
    ]
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
# Those that a rank may not start, and those with other commands than "launch".
_REFUSED = frozenset(["accelerate", "accelerate-launch", "deepspeed", "torchrun"])
_WITH_COMMANDS = ("accelerate", "accelerate.commands.accelerate_cli")
# Variables that torch elastic and accelerate set for the processes that they launch.
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")


def is_launch(words: Sequence[str]) -> bool:
    """True if a command line starts a launcher, by its name or as a Python module or file."""
    rest = [word for word in words if not re.match(r"(?!-)\w+=", word)]
    name = Path(rest[0]).name if rest else ""
    if name.startswith("python"):
        rest = rest[1:]
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[2 if rest[0] in ("-X", "-W") else 1 :]
        rest = rest[1:] if rest[:1] == ["-m"] else rest
        name = Path(rest[0]).name if rest else ""
    if name not in _REFUSED | LAUNCHER_MODULES:
        return False
    return name not in _WITH_COMMANDS or "launch" in rest[1:2]


@contextmanager
def launchers_refused(has_begun: Callable[[], bool]) -> Iterator[None]:
    """Before `has_begun()`, refuses to start a launcher by `subprocess` or `os.system`."""

    def guard(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def guarded(*args: Any, **keywords: Any) -> Any:
            if not has_begun():
                command = args[position] if len(args) > position else keywords.get("args")
                refuse_launcher(_words(command), keywords.get("env") or os.environ)
            return original(*args, **keywords)

        stack.enter_context(instance_attribute(owner, name, guarded))

    with ExitStack() as stack:
        guard(subprocess.Popen, "__init__", 1)
        guard(os, "system", 0)
        yield


def refuse_launcher(words: Sequence[str], child: Mapping[str, str]) -> None:
    """Raises if a command, about to start with the variables `child`, is a launcher that inherits a rank's variables.

    Raises:
        SetupError: It would start the whole training again.
    """
    is_started_by_launcher = any(name in child and name not in os.environ for name in _SET_BY_LAUNCHERS)
    # Without a rank's variables among its own, the child is not part of the run.
    if not {"RANK", "WORLD_SIZE"} <= child.keys() or not (is_launch(words) or is_started_by_launcher):
        return
    script = next((word for word in words if word.endswith(".py")), "train.py")
    raise SetupError(
        f"This rank is about to start {' '.join(words)[:200]!r}: a launcher in each rank would start the whole "
        "training again.",
        hint=f"Let the ranks run the launched script itself: unsloth-multigpu run {script} ... Start other programs "
        "without RANK and WORLD_SIZE in their environment.",
    )


def _words(command: object) -> list[str]:
    if isinstance(command, (str, bytes)):
        text = os.fsdecode(command)
        try:
            return shlex.split(text)
        except ValueError:  # Unbalanced quotes, which the shell will report.
            return text.split()
    if isinstance(command, os.PathLike):
        return [os.fsdecode(command)]
    return [os.fsdecode(word) for word in command] if isinstance(command, Sequence) else []
