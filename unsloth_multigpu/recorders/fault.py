"""Faults to inject into a run, as plain data: kind, rank, step, and how soon the run must end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.wire.context import ToolRequest

_PHASES = ("train", "save", "evaluate")
# Rank that means all ranks.
ALL_RANKS = -1
_ERRORS = ("raise", "exit", "memory", "nan", "disk_full")
_DEATHS = ("kill", "kill_supervisor", "corrupt")
_HANGS = ("stop", "loop")
KINDS = (*_ERRORS, *_DEATHS, *_HANGS, "sigterm")
# Ranks of each kind in `all_faults`, as rank or rank:phase. The other kinds are injected on the highest rank.
_PLACES: dict[str, tuple[str, ...]] = {
    "raise": ("0", "last"),
    "kill": ("0", "last", "0:save"),
    "stop": ("0", "last"),
    "disk_full": ("0:save",),
    "sigterm": ("0", "0:save", "0:evaluate"),
    **dict.fromkeys(("kill_supervisor", "corrupt"), ("0",)),
}
_DEATH_LIMIT_S = 2.0
# The supervisor reacts at once, but a failed rank has up to 6 seconds for Python's teardown (launch.watch).
_ERROR_LIMIT_S = _DEATH_LIMIT_S + 6.0
_HANG_SLACK_S = 5.0


def limit_s(kind: str, *, hang_timeout_s: float, grace_s: float) -> float | None:
    """Returns the limit from a fault to the end of a run without restarts, in seconds; None = no limit."""
    if kind in _HANGS:
        return hang_timeout_s + _HANG_SLACK_S if hang_timeout_s else None
    return grace_s if kind == "sigterm" else _DEATH_LIMIT_S if kind in _DEATHS else _ERROR_LIMIT_S


@dataclass(frozen=True)
class Fault:
    """One fault, injected once.

    Args:
        kind: One of `KINDS`.
        rank: The rank; `ALL_RANKS` = every rank.
        step: Optimizer step, from 1. If it does not have the phase, the next step that has it.
        attempt: Number of the start of the ranks, from 0.
        phase: "train"; "save" = after the model's file, before the other files; "evaluate" = after the first batch.
    """

    kind: str
    rank: int
    step: int
    attempt: int = 0
    phase: str = "train"

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("phase", _PHASES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"A fault of {name}={getattr(self, name)!r}; expected one of: {', '.join(known)}.",
                    hint="Faults are written kind@rank:step or kind@rank:step:phase.",
                )

    def __str__(self) -> str:
        rank = "all" if self.rank == ALL_RANKS else str(self.rank)
        return f"{self.kind}@{rank}:{self.step}" + (f":{self.phase}" if self.phase != "train" else "")


def parse_fault(text: str) -> Fault:
    """Parses `kind@rank:step` or `kind@rank:step:phase`, with rank `all` for every rank. Raises ConfigError."""
    kind, _, place = text.strip().partition("@")
    rank, _, when = place.partition(":")
    step, _, phase = when.partition(":")
    if not (rank.isdigit() or rank == "all") or not step.isdigit():
        raise ConfigError(
            f"{text!r} is not a fault.",
            hint="Write kind@rank:step or kind@rank:step:phase, as in kill@1:5 or stop@0:3.",
        )
    return Fault(kind, ALL_RANKS if rank == "all" else int(rank), int(step), phase=phase or "train")


def all_faults(num_steps: int, num_ranks: int) -> list[Fault]:
    """Returns every kind of fault, in the middle of a training of `num_steps` optimizer steps."""
    # After the first checkpoints of most trainings, with steps left.
    step = max(1, round(num_steps * 0.6))
    places = [(kind, *place.split(":")) for kind in KINDS for place in _PLACES.get(kind, ("last",))]
    return [Fault(kind, num_ranks - 1 if rank == "last" else 0, step, 0, *phase) for kind, rank, *phase in places]


def chaos_variables(folder: Path, faults: Sequence[Fault] = (), work: Path | None = None) -> dict[str, str]:
    """Returns the environment variables of a run with faults.

    `folder` is for `rank_N.jsonl` of each rank, `work` for the script's checkpoints and logs; None = the script's own.
    """
    values = {"folder": str(folder), "faults": list(map(asdict, faults)), "work": None if work is None else str(work)}
    return ToolRequest("chaos", values).variables()


def read_records(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Returns the records of a rank, oldest first, without an incomplete last line."""
    path = folder / f"rank_{rank}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
