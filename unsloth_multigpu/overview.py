"""The table of a running job, from the heartbeat pages of its ranks. Rates are those of the last seconds."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from unsloth_multigpu.report import Rates, rates_of
from unsloth_multigpu.wire.heartbeat import Figures, Heartbeat, Phase, read_beats
from unsloth_multigpu.wire.process import read_state
from unsloth_multigpu.wire.run import Run
from unsloth_multigpu.words import aligned, duration, gib, shown_lines

# Rates are computed over at least this time.
_WINDOW_S = 10.0
# A rank is stuck after so many seconds, and so many of its own steps, without progress.
_QUIET_S, _QUIET_STEPS = 5.0, 5.0
_TRAINS = (Phase.DATA, Phase.COMPUTE, Phase.UPDATE, Phase.AGREE)
_TAIL_BYTES = 4096
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[^\x20-\x7e\u00a0-\uffff]")


@dataclass(frozen=True)
class RankRow:
    """One rank, at one moment.

    Args:
        beat: Its heartbeat page.
        state: State of its process: "running", "stopped" by a signal, or "gone".
        quiet_s: Seconds since its last progress.
        rates: Rates of this rank.
        held_bytes: Memory now: on an accelerator what torch has allocated, on the CPU that of the process.
        log: Last line of its log; "" without a log, as for rank 0.
    """

    rank: int
    beat: Heartbeat
    state: str
    quiet_s: float
    rates: Rates
    held_bytes: int | None
    log: str

    @property
    def is_stuck(self) -> bool:
        """True if its process does not run, or it trains and has made no progress for several steps."""
        if self.state != "running":
            return True
        limit_s = max(_QUIET_S, _QUIET_STEPS * (self.beat.figures.step_s or 0.0))
        return self.beat.phase in _TRAINS and self.quiet_s > limit_s


@dataclass(frozen=True)
class Look:
    """A run at one moment.

    Args:
        rows: One row per rank, in order.
        rates: Rates of all ranks together; for waiting and padding the mean.
        elapsed_s: Seconds since the ranks were started.
    """

    run: Run
    rows: tuple[RankRow, ...]
    rates: Rates
    elapsed_s: float

    @property
    def step(self) -> int | None:
        """Step of the first rank that trains; None before the training."""
        return next((row.beat.step for row in self.rows if row.beat.step >= 0), None)

    @property
    def max_steps(self) -> int | None:
        """Number of steps of the training; None if not known."""
        return next((row.beat.figures.max_steps for row in self.rows if row.beat.figures.max_steps), None)

    @property
    def first_step(self) -> str:
        """Short result of the comparison of the first step with one process; "" without one."""
        return next((row.beat.first_step for row in self.rows if row.beat.first_step), "")

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, at the present rate; None while a rank is stuck."""
        if self.step is None or self.max_steps is None or not self.rates.steps_per_s:
            return None
        if self.step < self.max_steps and any(row.is_stuck for row in self.rows):
            return None
        return max(self.max_steps - self.step, 0) / self.rates.steps_per_s

    def values(self) -> dict[str, Any]:
        """Returns JSON values; docs/watch.md lists them."""
        return {
            "schema_version": 1,
            "run": {
                **{name: value for name, value in vars(self.run).items() if name != "begin_s"},
                "elapsed_s": self.elapsed_s,
                "state": self.run.state(),
            },
            "step": self.step,
            "max_steps": self.max_steps,
            "eta_s": self.eta_s,
            "first_step": self.first_step or None,
            **self.rates.values(),
            "ranks": [_values(row) for row in self.rows],
        }


class Overview:
    """Reads the state of a run repeatedly, and computes rates between two reads."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._looks: deque[tuple[float, dict[int, Figures]]] = deque()

    def look(self) -> Look:
        """Returns the present state. In the first seconds, rates are those since the training began."""
        now_s = time.monotonic()
        beats = read_beats(self.run.folder)
        figures = {rank: beat.figures for rank, beat in beats.items()}
        before = self._window_begin(now_s, figures)
        gained = {rank: found.since(before.get(rank, Figures())) for rank, found in figures.items()}
        rows = tuple(self._row(rank, beat, rates_of([gained[rank]]), now_s) for rank, beat in beats.items())
        elapsed_s = time.time() - self.run.begin_s
        return Look(self.run, rows, rates_of(list(gained.values())), elapsed_s)

    def _window_begin(self, now_s: float, figures: dict[int, Figures]) -> Mapping[int, Figures]:
        """Returns the figures at the start of the window; empty if a rank has made no step since."""
        steps = [found.num_steps or 0 for found in figures.values()]
        if self._looks and steps < [found.num_steps or 0 for found in self._looks[-1][1].values()]:
            self._looks.clear()  # Another training has begun.
        self._looks.append((now_s, figures))
        while len(self._looks) > 1 and now_s - self._looks[1][0] >= _WINDOW_S:
            self._looks.popleft()
        earlier_s, earlier = self._looks[0]
        is_old = now_s - earlier_s >= _WINDOW_S
        has_all = all(found.since(earlier.get(rank, Figures()))["num_steps"] for rank, found in figures.items())
        return earlier if is_old and has_all else {}

    def _row(self, rank: int, beat: Heartbeat, rates: Rates, now_s: float) -> RankRow:
        state, rss_bytes = _process(beat.pid)
        held_bytes = beat.figures.held_bytes if beat.device_id else rss_bytes
        log = last_line(Path(self.run.log_dir) / f"rank_{rank}.log") if rank else ""
        return RankRow(rank, beat, state, max(0.0, now_s - beat.progress_s), rates, held_bytes, log)


def last_line(path: Path) -> str:
    """Returns the last line of a log that has a letter or digit, as a terminal shows it, printable characters only."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    shown = [_CONTROL.sub("", line).strip() for line in shown_lines(text)]
    return next((line for line in reversed(shown) if any(map(str.isalnum, line))), "")


def columns_of(look: Look) -> list[tuple[str, list[str]]]:
    """Returns the columns of the table as (name, one cell per rank), without columns that have no values.

    Those that a narrow terminal can do without come last.
    """
    rows = look.rows
    columns = {
        "rank": [str(row.rank) for row in rows],
        "device": [row.beat.device or "-" for row in rows],
        "step": [_step(row.beat) for row in rows],
        "doing": [_doing(row) for row in rows],
        "samples/s": [_cell(row.rates.samples_per_s, _number) for row in rows],
        "tokens/s": [_cell(row.rates.tokens_per_s, _number) for row in rows],
        "waiting": [_cell(row.rates.waiting, _percent) for row in rows],
        "memory": [_cell(row.held_bytes, gib) for row in rows],
        "padding": [_cell(row.rates.padding, _percent) for row in rows],
        "peak": [_cell(row.beat.figures.peak_bytes, gib) for row in rows],
        "log": [row.log for row in rows],
    }
    always = ("rank", "device", "step", "doing")
    return [(name, cells) for name, cells in columns.items() if name in always or set(cells) - {"-", ""}]


def table_of(look: Look, width: int | None = None) -> list[str]:
    """Returns the names of the columns and a line per rank, cut to `width` characters."""
    return [line[:width] for line in lines_of(columns_of(look))]


def lines_of(columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Formats columns, each (name, cells), as lines."""
    return aligned([[name for name, _ in columns], *zip(*(cells for _, cells in columns), strict=True)])


def headline(look: Look) -> str:
    """Returns the state of the run in one line."""
    rates = look.rates
    parts = [f"{look.run.job} (pid {look.run.pid})", f"running {duration(look.elapsed_s)}"]
    if look.run.state() == "stopped":
        parts[1] = "its supervisor was stopped by a signal"
    if look.step is not None and look.max_steps:
        parts.append(f"step {look.step} of {look.max_steps}")
    if look.eta_s is not None:
        parts.append("done" if not look.eta_s else f"{duration(look.eta_s)} left")
    speeds = ((rates.samples_per_s, "samples/s"), (rates.tokens_per_s, "tokens/s"))
    parts += [f"{_number(value)} {unit}" for value, unit in speeds if value is not None]
    parts += [look.first_step] if look.first_step else []
    return ", ".join(parts)


def _values(row: RankRow) -> dict[str, Any]:
    beat, figures = row.beat, row.beat.figures
    return {
        "rank": row.rank,
        "pid": beat.pid,
        "state": row.state,
        "device": beat.device or None,
        "phase": beat.phase.name.lower(),
        "quiet_s": row.quiet_s,
        "is_stuck": row.is_stuck,
        "collective": beat.collective if beat.collective >= 0 else None,
        "step": beat.step if beat.step >= 0 else None,
        **{name: getattr(figures, name) for name in Figures.__dataclass_fields__ if name != "held_bytes"},
        **row.rates.values(),
        "memory_bytes": row.held_bytes,
        "log": row.log or None,
    }


def _process(pid: int) -> tuple[str, int | None]:
    state = read_state(pid)
    try:
        return state, None if state == "gone" else int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return "gone", None


def _doing(row: RankRow) -> str:
    if row.state != "running":
        return "its process was stopped by a signal" if row.state == "stopped" else "its process is gone"
    phase = row.beat.phase.name.lower().replace("_", " ")
    if not row.is_stuck:
        return phase
    return f"{phase}, no progress for {duration(row.quiet_s)}"


def _step(beat: Heartbeat) -> str:
    if beat.step < 0:
        return "-"
    return str(beat.step) if beat.figures.max_steps is None else f"{beat.step} / {beat.figures.max_steps}"


def _cell(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
