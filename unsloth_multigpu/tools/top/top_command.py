"""`unsloth-multigpu top`: shows a run until it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from unsloth_multigpu.cli.command import Arguments, Command
from unsloth_multigpu.cli.screen import Screen
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.overview import Overview, headline, table_of
from unsloth_multigpu.wire.heartbeat import read_beats
from unsloth_multigpu.wire.run import Run, find_runs, read_run
from unsloth_multigpu.words import duration

_EVERY_S = 0.5


@dataclass(frozen=True)
class Options(Arguments):
    """Shows a table of a script's or notebook's job on this machine, and ends when the job ends. It reads what the
    ranks write for their supervisor, and does not disturb the job. Only your own jobs are visible.

    Args:
        run_name: Process id of the job, as listed by `top` if there are several, or of one of its ranks; or its private
            folder.
        once: Print one table and end.
        json: Print one JSON object and end.
    """

    run_name: Annotated[str | None, Option(shown="RUN", otherwise="the one that runs")] = None
    once: Annotated[bool, Option()] = False
    json: Annotated[bool, Option()] = False


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Shows a run. Returns 0, also if there are several runs, which are listed.

    Raises SetupError if there is no such run, or there are several and `--json` was given.
    """
    screen, name = Screen(), own.run_name
    if name is None and not own.json and len(runs := find_runs()) > 1:
        screen.line(f"{len(runs)} jobs run here:\n{_listed(runs)}\nChoose one: unsloth-multigpu top {runs[0].pid}")
        return 0
    overview = Overview(choose_run(name))
    if own.json:
        screen.json(overview.look())
    elif own.once or not screen.is_terminal:
        for line, style in _lines(overview.look(), screen.console.width if screen.is_terminal else None):
            screen.line(line, style)
    else:
        _follow(screen, overview)
    return 0


COMMAND = Command(
    "top", "watch a running job: steps, speed, waiting and memory of each rank", Options, run, operand="run_name"
)


def choose_run(name: str | None) -> Run:
    """Finds the run with a name, or the only run.

    Raises SetupError if it is over or another user's, or if there are several and none was named.
    """
    runs = find_runs()
    if name is None:
        if len(runs) == 1:
            return runs[0]
        if not runs:
            raise SetupError(
                "No job of yours runs on this machine.",
                hint="If the job has another TMPDIR than this shell, give its folder.",
            )
        raise SetupError(f"{len(runs)} jobs run here.\n{_listed(runs)}", hint=f"Choose one: top {runs[0].pid}")
    if name.isdecimal():
        found = [run for run in runs if int(name) in {run.pid, *(b.pid for b in read_beats(run.folder).values())}]
        if found:
            return found[0]
    elif (named := read_run(Path(name))) is not None:
        if not named.is_here():
            raise SetupError(
                f"{name} is a run of another machine or container, or of an earlier boot: its processes are not "
                "visible here.",
                hint="Call top where the job was started.",
            )
        if named.state() != "over":
            return named
    hint = f"Running now:\n{_listed(runs)}" if runs else "No job of yours runs here now."
    raise SetupError(f"No job {name} of yours runs on this machine.", hint=hint)


def _listed(runs: list[Run]) -> str:
    lines = []
    for run in runs:
        stopped = ", stopped by a signal" if run.state() == "stopped" else ""
        since = duration(time.time() - run.begin_s)
        lines.append(f"  {run.pid}  {run.num_ranks} ranks, for {since}{stopped}: {run.command[:100]}")
    return "\n".join(lines)


def _lines(look: Mapping[str, Any], width: int | None) -> list[tuple[str, str]]:
    """Returns (line, style); a stuck rank is red."""
    if not look["ranks"]:
        return [(headline(look), "bold"), ("its ranks are starting", "")]
    names, *ranks = table_of(look, width)
    styles = ["bold red" if row["is_stuck"] else "" for row in look["ranks"]]
    return [(headline(look), "bold"), ("", ""), (names, "bold"), *zip(ranks, styles, strict=True)]


def _follow(screen: Screen, overview: Overview) -> None:
    """Updates the table until the run ends, or Ctrl-C."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    run = overview.run
    try:
        with Live(console=screen.console, auto_refresh=False, transient=False) as live:
            while run.state() != "over" and Path(run.folder).is_dir():
                lines = _lines(overview.look(), screen.console.width)
                live.update(Group(*(Text(line, style) for line, style in lines)), refresh=True)
                time.sleep(_EVERY_S)
        screen.line(f"{run.job} (pid {run.pid}) has ended.")
    except KeyboardInterrupt:
        screen.line("The job continues.")
