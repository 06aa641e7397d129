"""`unsloth-multigpu forecast`: forecasts the time of a script on N GPUs."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from unsloth_multigpu.cli.command import Arguments, Command
from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.deal.plan import CostModel
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.options import variable
from unsloth_multigpu.tools.forecast.estimate import Estimate, Link, Workload, advise, estimate, parse_link
from unsloth_multigpu.tools.script_program import (
    DEFAULT_LIMIT_S,
    check_is_no_rank,
    command_of,
    parse_numbers,
    run_first_steps,
)
from unsloth_multigpu.wire.child import exit_on_signal
from unsloth_multigpu.wire.run import private_dir
from unsloth_multigpu.words import duration

# Minimum of timed steps, so that one slow step does not decide.
_FEWEST_STEPS = 3
# A note is printed if the fitted costs differ by more from the measured ones.
_TOLERANCE = 0.15
_COLUMNS = ("GPUs", "step", "training", "speed-up", "efficiency", "computing", "waiting", "link", "update")
_LEGEND = (
    "speed-up: over the script in one process with its own micro-batches; efficiency: per GPU, relative to one GPU "
    "with planned micro-batches. The shares are of the GPUs' time; update = optimizer, loading, callbacks and logging."
)


@dataclass(frozen=True)
class Options(Arguments):
    """Runs the script up to the first steps of its first train() on one rank, and prints how long the training would
    take on other numbers of GPUs, the shares of waiting and communication, how many GPUs are useful, and what to
    change. The training saves nothing, and the rest of the script is not run. Exit code 0 = there is a forecast, 69 =
    there is none.

    Args:
        gpus: Numbers of GPUs, separated by commas.
        link: The slowest connection between GPUs: nvlink, pcie, or ethernet:25 (Gbit/s) between machines.
        steps: Optimizer steps to run; the first two are not timed.
        device: "cpu": measure on the CPU.
        json: Print one JSON object.
        timeout_s: Limit of each run, in seconds.
    """

    gpus: Annotated[Any, Option(check=parse_numbers, shown="N,N,...")] = "2,4,8"
    link: Annotated[Any, Option(check=parse_link, shown="NAME")] = "pcie"
    steps: Annotated[int, Option(least=5)] = 16
    device: Annotated[str, Option(choices=("auto", "cpu"))] = "auto"
    json: Annotated[bool, Option()] = False
    timeout_s: Annotated[float, Option(least=1, shown="SECONDS")] = DEFAULT_LIMIT_S


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Measures `program` on one rank, and prints the forecast. Returns 0.

    Raises:
        ConfigError: An invalid option.
        SetupError: The script failed, trained too few steps, or its training cannot be forecast.
        RankTimeoutError: A run took longer than its limit.
    """
    check_is_no_rank("forecast")
    progress = Progress("forecast")
    with private_dir() as folder, exit_on_signal():
        progress.say(f"runs {own.steps} steps of {' '.join(program)} on one rank")
        record = _run(own, program, folder)
        if len(record["steps"]) < _FEWEST_STEPS or not record["work"]["steps"]:
            raise SetupError(
                f"{len(record['steps'])} step(s) were timed; at least {_FEWEST_STEPS} complete steps are needed.",
                hint="Raise --steps, and max_steps of the script: the first two steps are not timed.",
            )
    work = Workload(**{**record["work"], "cost": CostModel(**record["work"]["cost"])})
    num_samples = sum(work.sizes)
    rows = [estimate(work, n, own.link) for n in sorted({1, *own.gpus}) if n <= num_samples]
    refused = [n for n in own.gpus if n > num_samples]
    if own.json:
        values = {
            "schema_version": 3,
            "command": list(program),
            **{name: record[name] for name in ("trainer", "device", "num_trained", "misfit")},
            "notes": _notes(record),
            "num_timed_steps": len(record["steps"]),
            "measured": {**asdict(work), "steps": len(work.steps)},
            "link": asdict(own.link),
            "forecasts": [asdict(row) for row in rows],
            "refused": refused,
            "advice": advise(work, rows),
        }
        Screen().json(values)
    else:
        _show(record, work, own.link, rows, refused)
    return 0


COMMAND = Command(
    "forecast", "forecast the time of a script on several GPUs from some steps on one", Options, run, runs_program=True
)


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Returns assumptions and uncertainties."""
    notes = []
    if record["device"] == "CPU":
        notes.append("measured on a CPU: the figures are for ranks of the same speed, and not for GPUs")
    if record["misfit"] > _TOLERANCE:
        notes.append(
            f"the fitted costs match the measured steps only within {record['misfit']:.0%}, because of other programs "
            "on this machine or compilation; raise --steps"
        )
    return notes


def _show(
    record: Mapping[str, Any], work: Workload, link: Link, rows: Sequence[Estimate], refused: Sequence[int]
) -> None:
    """Prints the measurement, the table and the advice."""
    screen, num_samples = Screen(), sum(work.sizes)
    lengths = [n for step in work.steps for n in step]
    screen.line(
        f"{record['trainer']}, {record['num_trained']:,} trained parameters, {num_samples} samples in a step, divided "
        f"by length ({min(lengths)} to {max(lengths)} tokens)"
    )
    screen.line(
        f"measured on one rank ({record['device']}), {len(record['steps'])} steps: {_short(work.token_s)} per token, "
        f"an overhead of {work.cost.overhead_tokens:.0f} tokens per micro-batch, {_short(work.update_s)} per update; "
        f"the fitted costs match these steps within {record['misfit']:.1%}"
    )
    screen.line(f"link: {link}")
    for note in _notes(record):
        screen.line(f"note: {note}")
    screen.line()
    cells = [_cells(row) for row in rows]
    cells += [(f"{n:,}", "refused", f"{num_samples:,} samples", *[""] * 6) for n in refused]
    screen.table(_COLUMNS, cells, num_left=0)
    screen.line(f"\n{_LEGEND}\n")
    head, *rest = advise(work, rows)
    screen.line(head, "bold")
    for line in rest:
        screen.line(line)


def _cells(row: Estimate) -> tuple[str, ...]:
    shares = (row.efficiency, row.computing, row.waiting, row.link, row.update)
    first = (f"{row.num_ranks:,}", _short(row.step_s), duration(row.total_s), f"{row.speed_up:.2f}x")
    return (*first, *(f"{share:.1%}" for share in shares))


def _short(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _run(own: Options, program: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs the first steps of the program on one rank, and returns its record."""
    asked = {"folder": str(folder / "one"), "num_steps": own.steps, "num_gpus": 1}
    variables = {variable("device"): "cpu"} if own.device == "cpu" else {}
    code, records, tail = run_first_steps("forecast", program, asked, own.device, variables, own.timeout_s)
    if code != 0:
        shown = textwrap.indent(f"\n{tail}", "  | ")
        raise SetupError(
            f"The script ended with exit code {code}; there is no forecast.{shown}",
            hint=f"`{shlex.join(command_of(program))}` runs it as this command does.",
        )
    return records[0]
