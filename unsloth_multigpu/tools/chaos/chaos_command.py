"""`unsloth-multigpu chaos`: injects faults into a script's training and checks how it ends or continues."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from unsloth_multigpu.cli.command import Arguments, Command
from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.tools.chaos.chaos_run import Ended, RunTrace, ScriptRuns, compare_samples, compare_weights
from unsloth_multigpu.tools.chaos.fault import Fault, all_faults, limit_s, parse_fault
from unsloth_multigpu.tools.script_program import check_is_no_rank
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.process import exit_on_signal
from unsloth_multigpu.words import duration, last_lines

# Largest relative difference of a tensor that fp32 rounding explains.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Options(Arguments):
    """Runs the script once without faults and then once per fault, and compares messages, time to the end, leftover
    processes, samples and weights. The script runs in this folder; checkpoints and logs of its Trainers go to a
    separate folder per run, and nothing is uploaded. Files that the script itself saves are saved in each run: {run} in
    its arguments is replaced by a new folder. Exit code 0 = every run ended or continued as it should.

    Args:
        faults: "all", or kind@rank:step[:train|save|evaluate],... with "all" for every rank, as in kill@1:5,stop@0:8.
            Kinds: raise, exit, memory, nan, disk_full, kill, kill_supervisor, corrupt, stop, loop, sigterm.
        json: Print one JSON object.
        limit_s: Limit of each start of the ranks, in seconds.
    """

    faults: Annotated[str, Option(shown="FAULTS")] = "all"
    json: Annotated[bool, Option()] = False
    limit_s: Annotated[float, Option(least=1, shown="SECONDS")] = 600.0


# balance="off", because the planner's measurements differ between runs, and weights would differ by rounding. The limit
# for hangs is short to save time.
DEFAULTS = {"num_gpus": 2, "max_restarts": 0, "hang_timeout_s": 10.0, "balance": "off"}


@dataclass
class FaultRow:
    """One fault and its result.

    Args:
        told: The launcher's message.
        ended_s: Seconds from the fault until the last process was gone; None if the run was restarted or continued.
        code: Exit code of the run with the fault.
        from_step: The finished step from which the training resumed; None if it was not restarted.
        new_step_s: Seconds from the fault, or from the second start of the command, to the first new step.
        lost, repeated: Samples that are missing or repeated, compared with the run without faults.
        difference: See `compare_weights`.
        reasons: Deviations from the expected result.
        note: Why the fault could not be injected.
    """

    fault: str
    told: str = ""
    ended_s: float | None = None
    code: int | None = None
    num_orphans: int = 0
    from_step: int | None = None
    new_step_s: float | None = None
    lost: int | None = None
    repeated: int | None = None
    difference: float | None = None
    reasons: list[str] = field(default_factory=list)
    note: str = ""

    def cells(self) -> dict[str, str]:
        """Returns the row of the table by column."""
        cells = {
            "fault": self.fault,
            "ended after s": "-" if self.ended_s is None else f"{self.ended_s:.1f}",
            "exit code": "none" if self.code is None else str(self.code),
            "orphans": str(self.num_orphans),
            "resumed from step": "-" if self.from_step is None else str(self.from_step),
            "new step after s": "-" if self.new_step_s is None else f"{self.new_step_s:.1f}",
            "samples lost / repeated": "-" if self.lost is None else f"{self.lost} / {self.repeated}",
            "weights": {None: "-", 0.0: "equal"}.get(self.difference, f"off by {self.difference or 0:.1e}"),
        }
        return {**dict.fromkeys(cells, "-"), "fault": self.fault} if self.note else cells


@dataclass(frozen=True)
class Judge:
    """Compares runs with faults to the run without faults.

    Args:
        folder: The command's private folder.
        runs: The run without faults.
        reference: Its records.
        cold_s: Seconds from its start to its first step.
        options: Options of every run.
    """

    folder: Path
    runs: ScriptRuns
    reference: RunTrace
    cold_s: float
    options: Mapping[str, Any]

    def try_out(self, fault: Fault) -> FaultRow:
        """Runs the script with a fault, resumes it without, and evaluates the result."""
        limit_of_runs_s = self.runs.limit_s * (1 + int(self.options["max_restarts"]))
        runs = replace(self.runs, folder=self.folder / "fault", limit_s=limit_of_runs_s)
        shutil.rmtree(runs.folder, ignore_errors=True)
        options = {**self.options, "resume": "auto"}
        ended = runs.run((fault,), options)
        trace = RunTrace.read(runs.records)
        row = FaultRow(str(fault), ended.told, None, ended.code, ended.num_orphans)
        if not trace.of("injected"):
            if ended.code == 0:
                row.note = "not injected: the training has no such phase after that step"
            else:
                row.reasons.append(f"ended with {ended.code} before the fault\n{last_lines(ended.output)}")
            return row
        self._judge_end(row, ended, trace)
        if ended.code != 0:
            again = runs.run((), options)
            trace = RunTrace.read(runs.records)
            row.num_orphans += again.num_orphans
            if again.code != 0:
                row.reasons.append(f"started again, it ended with {again.code}\n{last_lines(again.output)}")
                return row
            first_s = trace.first_step_s(again.start_s)
            row.new_step_s = None if first_s is None else first_s - again.start_s
        if row.new_step_s is not None:
            row.from_step = int(trace.of("begin")[-1]["step"])
        row.lost, row.repeated = compare_samples(self.reference, trace)
        row.difference = compare_weights(self.reference, trace)
        if row.lost or row.repeated:
            row.reasons.append(f"{row.lost} samples lost, {row.repeated} repeated")
        if row.difference is None or row.difference > ROUNDING:
            row.reasons.append(f"weights differ from those of the run without faults by {row.difference}")
        return row

    def _judge_end(self, row: FaultRow, ended: Ended, trace: RunTrace) -> None:
        if ended.code is None:
            row.reasons.append(f"did not end within {self.runs.limit_s:g} s\n{last_lines(ended.output)}")
        if row.num_orphans:
            row.reasons.append(f"{row.num_orphans} processes were left behind")
        fault = trace.of("injected")[0]
        step_s = trace.first_step_s(fault["time_s"])
        if step_s is not None:  # The ranks have started again.
            row.new_step_s = step_s - fault["time_s"]
            return
        row.ended_s = ended.end_s - fault["time_s"]
        grace_s = self.reference.of("begin")[0]["config"]["grace_s"]
        bound_s = limit_s(fault["kind"], hang_timeout_s=self.options["hang_timeout_s"], grace_s=grace_s)
        if bound_s is not None and row.ended_s > bound_s:
            row.reasons.append(f"ended after {row.ended_s:.1f} s; at most {bound_s:g} s were expected")


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Runs `program` once without faults and once with each, and prints the results.

    Returns:
        0 if every run ended or continued as it should, else 1; the script's own exit code if it fails without a fault.

    Raises:
        ConfigError: An invalid option or fault.
        SetupError: Started in a rank, or the script has no training that can be recorded.
    """
    check_is_no_rank("chaos")
    run_options = {**DEFAULTS, **{name: value for name, value in given.items() if value is not None}}
    num_ranks = MultiGPUConfig.resolve(run_options).num_gpus or 0
    if num_ranks < 2:
        raise ConfigError("chaos needs at least 2 ranks.", hint="Set --num-gpus 2.")
    named = None if own.faults == "all" else [parse_fault(text) for text in own.faults.split(",")]
    if named and max(fault.rank for fault in named) >= num_ranks:
        raise ConfigError(f"faults={own.faults!r}: there are {num_ranks} ranks.", hint="Count them from 0.")
    # Shell scripts ignore SIGINT in background jobs, which the runs would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = {**os.environ, "WANDB_MODE": "disabled", "PYTHONHASHSEED": "0"}
    with private_dir() as folder, exit_on_signal(), Progress("chaos") as progress:
        runs = ScriptRuns(folder / "reference", program, environment, own.limit_s)
        progress.say(f"the run without faults, at most {runs.limit_s:g} s, to estimate the time of the others")
        progress.show("the run without faults")
        ended = runs.run((), run_options)
        progress.clear()
        if ended.code != 0:
            said = f"{last_lines(ended.output)}\nchaos: without a fault the run ended with {ended.code}."
            Screen(sys.stderr).line(said)
            return 1 if ended.code is None else 128 - ended.code if ended.code < 0 else ended.code
        judge = _prepare(folder, runs, ended, run_options)
        rows = _try_all(named or all_faults(judge.reference.num_steps, num_ranks), judge, ended, progress)
    return _report(rows, judge, as_json=own.json)


COMMAND = Command(
    "chaos",
    "kill, stop and starve ranks of a script, and check whether its training ends or continues as it should",
    Options,
    run,
    runs_program=True,
    has_options_of_run=True,
    defaults=DEFAULTS,
)


def _prepare(folder: Path, runs: ScriptRuns, ended: Ended, run_options: Mapping[str, Any]) -> Judge:
    reference = RunTrace.read(runs.records)
    first_s = reference.first_step_s(ended.start_s)
    if first_s is None:
        raise SetupError(
            "The script ended without a training that chaos could record.",
            hint="It must call train() of a transformers Trainer on every rank.",
        )
    begun = reference.of("begin")[0]
    for name, value in run_options.items():
        if begun["config"][name] != value:
            raise ConfigError(
                f"chaos sets {name}={value!r}, but the script's enable_multi_gpu() sets {begun['config'][name]!r}.",
                hint="Leave it out of the script's call for chaos.",
            )
    if not Path(begun["output_dir"]).is_relative_to(runs.work.resolve()):
        raise ConfigError(
            f"The script saves to {begun['output_dir']}, where runs would find each other's checkpoints.",
            hint="Its Trainer must take the folder from TrainingArguments; or write {run} in the script's arguments.",
        )
    return Judge(folder, runs, reference, first_s - ended.start_s, run_options)


def _try_all(faults: Sequence[Fault], judge: Judge, ended: Ended, progress: Progress) -> list[FaultRow]:
    """Tries every fault, after an estimate of the time."""
    run_s = ended.end_s - ended.start_s
    # Twice the time of a run: one with the fault, and one that resumes.
    progress.say(
        f"it took {run_s:.1f} s, {judge.cold_s:.1f} s of that to the end of the first step; "
        f"{len(faults)} more with faults take about {duration(2 * run_s * len(faults))}"
    )
    rows: list[FaultRow] = []
    for number, fault in enumerate(faults, 1):
        progress.begin(number, len(faults), str(fault))
        rows.append(judge.try_out(fault))
        for reason in rows[-1].reasons:
            progress.say(f"{fault}: NOT AS EXPECTED: {reason}", "bold red")
    return rows


def _report(rows: Sequence[FaultRow], judge: Judge, *, as_json: bool) -> int:
    bad = [row.fault for row in rows if row.reasons]
    screen = Screen()
    if as_json:
        facts = {"schema_version": 1, "command": list(judge.runs.program), "cold_start_s": judge.cold_s}
        result = {**facts, "options": dict(judge.options), "good": not bad, "rows": [asdict(row) for row in rows]}
        screen.json(result)
        return 1 if bad else 0
    _show(rows, screen)
    screen.line(f"cold start to the first step: {judge.cold_s:.1f} s")
    result_line = f"NOT AS EXPECTED: {', '.join(bad)}" if bad else "Every run ended or continued as it should."
    screen.line(result_line, "bold red" if bad else "bold green")
    return 1 if bad else 0


def _show(rows: Sequence[FaultRow], screen: Screen) -> None:
    """Prints the table, and below it the messages, which are too long for a column."""
    cells = [row.cells() for row in rows]
    screen.table(list(cells[0]), [list(row.values()) for row in cells], num_left=1)
    for row in rows:
        screen.line(f"{row.fault}: {row.note or row.told.removesuffix(' The other ranks were stopped.') or '-'}")
    screen.line()
