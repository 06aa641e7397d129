"""Which of the tested stacks is nearest to the one that is installed. `make matrix` writes matrix.json."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.versions import installed_version

MATRIX = Path(__file__).with_name("matrix.json")
# What a stack is known by, the most important first.
_LIBRARIES = ("torch", "transformers", "trl", "unsloth", "accelerate", "peft", "datasets", "python")


def read_rows() -> list[dict[str, Any]]:
    """The rows that were tested, from the oldest to the newest."""
    rows: list[dict[str, Any]] = json.loads(MATRIX.read_text(encoding="utf-8"))
    return rows


def installed_stack() -> dict[str, str | None]:
    """Versions of what stacks are compared by; None = not installed."""
    return {name: installed_version(name) for name in _LIBRARIES} | {"python": platform.python_version()}


def nearest_row(
    rows: Sequence[Mapping[str, Any]], installed: Mapping[str, str | None]
) -> tuple[Mapping[str, Any], list[str]]:
    """The row with the fewest libraries of another release, and these; among equals the newest.

    Args:
        rows: As in matrix.json, at least one.
        installed: Library -> version, None where it is absent. Patch releases are no difference.
    """
    differs = [
        [name for name in _LIBRARIES if _release(installed.get(name)) != _release(row["versions"].get(name))]
        for row in rows
    ]
    best = min(range(len(rows)), key=lambda number: (len(differs[number]), -number))
    return rows[best], differs[best]


def nearest_text(row: Mapping[str, Any], differs: Sequence[str], installed: Mapping[str, str | None]) -> str:
    """That in one line for people."""
    tested = row["versions"]
    main = ", ".join(f"{name} {tested[name]}" for name in _LIBRARIES[:3] if name in tested)
    failed = f", {len(row['failed'])} tests failed there" if row["failed"] else ""
    said = [f"{name} {installed.get(name) or 'not installed'} (row: {tested.get(name) or 'none'})" for name in differs]
    return f'"{row["name"]}" ({main}{failed}); ' + (f"differs in: {', '.join(said)}" if said else "no difference")


def _release(version: str | None) -> list[int] | None:
    return None if version is None else [int(number) for number in re.findall(r"\d+", version)[:2]]
