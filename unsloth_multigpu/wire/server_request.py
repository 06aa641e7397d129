"""Requests the generation server: rank 0 writes an event, and the supervisor creates a file when the server answers."""

from __future__ import annotations

import os
from pathlib import Path

# Kind of the event. Its facts: "port" of the server, and "arguments" of TRL's command, from the Trainer.
SERVER_WANTED = "server wanted"


def say_ready(run_dir: str | os.PathLike[str], attempt: int) -> None:
    """Reports that the server of this attempt answers. Called by the supervisor."""
    _path(run_dir, attempt).touch(mode=0o600)


def is_ready(run_dir: str | os.PathLike[str], attempt: int) -> bool:
    """True once the server of this attempt has answered. Takes microseconds."""
    return _path(run_dir, attempt).exists()


def _path(run_dir: str | os.PathLike[str], attempt: int) -> Path:
    return Path(run_dir, f"server_{attempt}")
