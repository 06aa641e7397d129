"""Which of the tested stacks is nearest to the one that is installed. `make matrix` writes matrix.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.versions import installed_version

MATRIX = Path(__file__).with_name("matrix.json")
# What a stack is known by, the most important first.
_LIBRARIES = ("torch", "transformers", "trl", "unsloth", "accelerate", "peft", "datasets", "python")


@dataclass(frozen=True)
class NearestRow:
    """A tested stack and what tells it from another one.

    Args:
        name: As docs/compatibility.md has it.
        versions: Library -> version; what the row has not is left out.
        differs: Library -> installed version and the row's, None for absent. Patch releases are no difference.
        num_failed: Tests that failed in the row.
        date: When the row was tested, ISO 8601.
    """

    name: str
    versions: Mapping[str, str]
    differs: Mapping[str, tuple[str | None, str | None]]
    num_failed: int
    date: str

    @property
    def text(self) -> str:
        """One line for people."""
        main = ", ".join(f"{name} {self.versions[name]}" for name in _LIBRARIES[:3] if name in self.versions)
        failed = f", {self.num_failed} tests failed there" if self.num_failed else ""
        said = [
            f"{name} {installed or 'not installed'} (row: {tested or 'none'})"
            for name, (installed, tested) in self.differs.items()
        ]
        return f'"{self.name}" ({main}{failed}); ' + (f"differs in: {', '.join(said)}" if said else "no difference")


def read_rows() -> list[dict[str, Any]]:
    """The rows that were tested, from the oldest to the newest."""
    rows: list[dict[str, Any]] = json.loads(MATRIX.read_text(encoding="utf-8"))
    return rows


def installed_stack() -> dict[str, str | None]:
    """Versions of what stacks are compared by; None = not installed."""
    return {name: installed_version(name) for name in _LIBRARIES}


def nearest_row(rows: Sequence[Mapping[str, Any]], installed: Mapping[str, str | None]) -> NearestRow:
    """The row with the fewest libraries of another release; among equals the one whose torch, then transformers and so
    on, is nearest.

    Args:
        rows: As in matrix.json, at least one.
        installed: Library -> version, None where it is absent.
    """

    def distance(row: Mapping[str, Any]) -> tuple[int, list[float]]:
        steps = [_distance(installed.get(name), row["versions"].get(name)) for name in _LIBRARIES]
        return sum(step > 0 for step in steps), steps

    row = min(rows, key=distance)
    tested = row["versions"]
    pairs = {name: (installed.get(name), tested.get(name)) for name in _LIBRARIES}
    differs = {name: pair for name, pair in pairs.items() if _distance(*pair) > 0}
    return NearestRow(row["name"], tested, differs, len(row["failed"]), row["date"])


def _distance(first: str | None, second: str | None) -> float:
    """0 for releases that differ at most in their patch, infinite where only one is there."""
    if first is None or second is None:
        return 0.0 if first == second else float("inf")
    (major, minor), (other_major, other_minor) = _release(first), _release(second)
    return abs(major - other_major) * 1000.0 + abs(minor - other_minor)


def _release(version: str) -> tuple[int, int]:
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    major, minor = [*numbers, 0, 0][:2]
    return major, minor
