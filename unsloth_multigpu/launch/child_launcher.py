"""Refuses launchers such as torchrun as child processes of a rank: every rank would start the whole training again.

Needs no torch.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.seam import instance_attribute

# A launcher by its name, or as a Python module or file.
_LAUNCH = re.compile(
    r"(\w+=\S* )*"  # Variables, in a command for a shell.
    r"(\S*python[\d.]* (-[XW] \S+ |-\S+ )*)?"
    r"(\S*/)?(torchrun|torch\.distributed\.(run|launch)|deepspeed|deepspeed\.launcher\.runner|accelerate launch"
    r"|accelerate-launch|accelerate\.commands\.(launch|accelerate_cli launch))( |$)"
)
# Also the quotes of a command for a shell.
_BETWEEN_WORDS = re.compile(r"[\s\\\"']+")
# Variables that torch elastic and accelerate set for the processes that they launch.
_SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")


@contextmanager
def launchers_refused(has_begun: Callable[[], bool]) -> Iterator[None]:
    """Before `has_begun()`, refuses to start a launcher by `subprocess` or `os.system`."""

    def guard(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def guarded(*args: Any, **keywords: Any) -> Any:
            if not has_begun():
                command = args[position] if len(args) > position else keywords.get("args")
                words = [command] if isinstance(command, (str, bytes, os.PathLike)) else command
                env = keywords.get("env")
                if isinstance(words, Sequence):  # An iterator can be read only once.
                    text = _BETWEEN_WORDS.sub(" ", " ".join(map(os.fsdecode, words))).strip()
                    refuse_launcher(text, os.environ if env is None else env)
            return original(*args, **keywords)

        stack.enter_context(instance_attribute(owner, name, guarded))

    with ExitStack() as stack:
        guard(subprocess.Popen, "__init__", 1)
        guard(os, "system", 0)
        yield


def refuse_launcher(command: str, environment: Mapping[str, str]) -> None:
    """Refuses a command that is about to start with this environment if it is a launcher with a rank's variables.

    Raises:
        SetupError: It would start the whole training again.
    """
    is_started_by_launcher = any(name in environment and name not in os.environ for name in _SET_BY_LAUNCHERS)
    # Without a rank's variables among its own, the child is not part of the run.
    if not {"RANK", "WORLD_SIZE"} <= environment.keys() or not (_LAUNCH.match(command) or is_started_by_launcher):
        return
    script = next((word for word in command.split() if word.endswith(".py")), "train.py")
    raise SetupError(
        f"This rank is about to start {command[:200]!r}: a launcher in each rank would start the whole training again.",
        hint=f"Let the ranks run the launched script itself: unsloth-multigpu run {script} ... Start other programs "
        "without RANK and WORLD_SIZE in their environment.",
    )
