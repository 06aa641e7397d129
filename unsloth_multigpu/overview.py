"""The table of a running job, from the heartbeat pages of its ranks. Rates are those of the last seconds."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from unsloth_multigpu.report import Figures, rates_of
from unsloth_multigpu.wire.child import read_tail
from unsloth_multigpu.wire.heartbeat import Heartbeat, Phase, read_beats
from unsloth_multigpu.wire.process import read_state
from unsloth_multigpu.wire.run import Run
from unsloth_multigpu.words import aligned, duration, gib

# Rates are computed over at least this time.
_WINDOW_S = 10.0
# A rank is stuck after so many seconds, and so many of its own steps, without progress.
_QUIET_S, _QUIET_STEPS = 5.0, 5.0
_TRAINS = (Phase.DATA, Phase.COMPUTE, Phase.UPDATE, Phase.AGREE)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[^\x20-\x7e\u00a0-\uffff]")


class Overview:
    """Reads the state of a run repeatedly, and computes rates between two reads."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._before: deque[tuple[float, dict[int, Figures]]] = deque()

    def look(self) -> dict[str, Any]:
        """Returns the current state as JSON values, which docs/watch.md lists.

        In the first seconds, rates are those since the training began. `eta_s` is not known while a rank is stuck.
        """
        now_s = time.monotonic()
        beats = read_beats(self.run.folder)
        figures = {rank: beat.figures for rank, beat in beats.items()}
        before = self._window_begin(now_s, figures)
        gained = {rank: found.since(before.get(rank, Figures())) for rank, found in figures.items()}
        ranks = [self._values(rank, beat, now_s) | rates_of([gained[rank]]) for rank, beat in beats.items()]
        rates = rates_of(list(gained.values()))
        # Those of the first rank that trains.
        step, max_steps = (_first(row[name] for row in ranks) for name in ("step", "max_steps"))
        eta_s, steps_per_s = None, rates["steps_per_s"]
        is_moving = step == max_steps or not any(row["is_stuck"] for row in ranks)
        if step is not None and max_steps and steps_per_s and is_moving:
            eta_s = max(max_steps - step, 0) / steps_per_s
        return {
            "schema_version": 1,
            "run": {
                **{name: value for name, value in vars(self.run).items() if name != "begin_s"},
                "elapsed_s": time.time() - self.run.begin_s,
                "state": self.run.state(),
            },
            "step": step,
            "max_steps": max_steps,
            "eta_s": eta_s,
            "first_step": _first(beat.first_step or None for beat in beats.values()),
            **rates,
            "ranks": ranks,
        }

    def _window_begin(self, now_s: float, figures: dict[int, Figures]) -> Mapping[int, Figures]:
        """Returns the figures at the start of the window; empty if a rank has made no step since."""
        steps = [found.num_steps or 0 for found in figures.values()]
        if self._before and steps < [found.num_steps or 0 for found in self._before[-1][1].values()]:
            self._before.clear()  # Another training has begun.
        self._before.append((now_s, figures))
        while len(self._before) > 1 and now_s - self._before[1][0] >= _WINDOW_S:
            self._before.popleft()
        earlier_s, earlier = self._before[0]
        is_old = now_s - earlier_s >= _WINDOW_S
        has_all = all(found.since(earlier.get(rank, Figures())).num_steps for rank, found in figures.items())
        return earlier if is_old and has_all else {}

    def _values(self, rank: int, beat: Heartbeat, now_s: float) -> dict[str, Any]:
        state, quiet_s = read_state(beat.pid), max(0.0, now_s - beat.progress_s)
        # A rank is stuck if its process does not run, or it trains and has made no progress for several steps.
        limit_s = max(_QUIET_S, _QUIET_STEPS * (beat.figures.step_s or 0.0))
        return {
            "rank": rank,
            "pid": beat.pid,
            "state": state,
            "device": beat.device or None,
            "phase": beat.phase.name.lower(),
            "quiet_s": quiet_s,
            "is_stuck": state != "running" or (beat.phase in _TRAINS and quiet_s > limit_s),
            "collective": beat.collective if beat.collective >= 0 else None,
            "step": beat.step if beat.step >= 0 else None,
            **{name: value for name, value in vars(beat.figures).items() if name != "held_bytes"},
            "memory_bytes": beat.figures.held_bytes,
            # Rank 0 writes to the terminal.
            "log": (last_line(Path(self.run.log_dir) / f"rank_{rank}.log") if rank else "") or None,
        }


def last_line(path: Path) -> str:
    """Returns the last line of a log that has a letter or digit, as a terminal shows it, printable characters only."""
    shown = [_CONTROL.sub("", line).strip() for line in read_tail(path).splitlines()]
    return next((line for line in reversed(shown) if any(map(str.isalnum, line))), "")


def columns_of(look: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the columns of the table by name, with one cell per rank, without columns that have no values.

    Those that a narrow terminal can do without come last.
    """
    rows = look["ranks"]
    columns = {
        "rank": [str(row["rank"]) for row in rows],
        "device": [row["device"] or "-" for row in rows],
        "step": [_step(row) for row in rows],
        "doing": [_doing(row) for row in rows],
    }
    figures: Mapping[str, tuple[str, Callable[[Any], str]]] = {
        "samples/s": ("samples_per_s", _number),
        "tokens/s": ("tokens_per_s", _number),
        "waiting": ("waiting", _percent),
        "memory": ("memory_bytes", gib),
        "padding": ("padding", _percent),
        "peak": ("peak_bytes", gib),
        "pid": ("pid", str),
        "log": ("log", str),
    }
    for name, (key, shown) in figures.items():
        if any(row[key] is not None for row in rows):
            columns[name] = ["-" if row[key] is None else shown(row[key]) for row in rows]
    return columns


def table_of(look: Mapping[str, Any], width: int | None = None) -> list[str]:
    """Returns the names of the columns and a line per rank, cut to `width` characters."""
    columns = columns_of(look)
    return [line[:width] for line in aligned([list(columns), *zip(*columns.values(), strict=True)])]


def headline(look: Mapping[str, Any]) -> str:
    """Returns the state of the run in one line."""
    run, eta_s = look["run"], look["eta_s"]
    parts = [f"{run['job']} (pid {run['pid']})", f"running {duration(run['elapsed_s'])}"]
    if run["state"] == "stopped":
        parts[1] = "its supervisor was stopped by a signal"
    if look["step"] is not None and look["max_steps"]:
        parts.append(f"step {look['step']} of {look['max_steps']}")
    if eta_s is not None:
        parts.append("done" if not eta_s else f"{duration(eta_s)} left")
    speeds = ((look["samples_per_s"], "samples/s"), (look["tokens_per_s"], "tokens/s"))
    parts += [f"{_number(value)} {unit}" for value, unit in speeds if value is not None]
    parts += [look["first_step"]] if look["first_step"] else []
    return ", ".join(parts)


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _doing(row: Mapping[str, Any]) -> str:
    if row["state"] != "running":
        return "its process was stopped by a signal" if row["state"] == "stopped" else "its process is gone"
    phase = row["phase"].replace("_", " ")
    return f"{phase}, no progress for {duration(row['quiet_s'])}" if row["is_stuck"] else phase


def _step(row: Mapping[str, Any]) -> str:
    if row["step"] is None:
        return "-"
    return str(row["step"]) if row["max_steps"] is None else f"{row['step']} / {row['max_steps']}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
