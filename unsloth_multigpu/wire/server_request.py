"""Rank 0 asks its supervisor for the server that generates, by an event; a file says that it answers."""

from __future__ import annotations

import os
from pathlib import Path

# The event. Its facts: "port", where the server is to listen, and "arguments" of TRL's command, from the Trainer.
SERVER_WANTED = "server wanted"


def say_ready(run_dir: str | os.PathLike[str], attempt: int) -> None:
    """The server of this attempt answers. Called by the supervisor."""
    _path(run_dir, attempt).touch(mode=0o600)


def is_ready(run_dir: str | os.PathLike[str], attempt: int) -> bool:
    """True once the server of this attempt has answered. Takes microseconds."""
    return _path(run_dir, attempt).exists()


def _path(run_dir: str | os.PathLike[str], attempt: int) -> Path:
    return Path(run_dir, f"server_{attempt}")
