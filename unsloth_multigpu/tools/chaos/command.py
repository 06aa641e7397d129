"""`unsloth-multigpu chaos`: what does a script's training do when a rank dies, hangs, or is asked to stop?"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from unsloth_multigpu.cli.screen import Progress, Screen, about, left_s
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.launch.watchdog import LONGEST_FACTOR
from unsloth_multigpu.options import MultiGPUConfig, command_options, file_variables
from unsloth_multigpu.row import CommandOption
from unsloth_multigpu.tools.chaos.fault import KINDS, End, Fault, kinds_text, limit_s, parse_fault
from unsloth_multigpu.tools.chaos.leavings import written_since
from unsloth_multigpu.tools.chaos.plan import Costs, Trial, all_trials, random_trial, torn_trial
from unsloth_multigpu.tools.chaos.result import (
    ROUNDING,
    FaultRow,
    RunTrace,
    compare_samples,
    compare_weights,
    markdown,
    show,
)
from unsloth_multigpu.tools.chaos.run import Ended, Scene
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.tools.tail import last_lines
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.identity import read_identity
from unsloth_multigpu.wire.process import exit_on_signal

# Options that a run does not have, or that mean something else here: see cli.command.
OWN_OPTIONS: dict[str, CommandOption] = {
    "faults": CommandOption(
        str,
        '"all", or kind@rank:step[:train|save|evaluate],... with "all" for every rank, as in kill@1:5,stop@0:8. Kinds: '
        f"{kinds_text()}. [all]",
        "FAULTS",
    ),
    "random": CommandOption(
        int, "Instead of --faults, this many random faults over one run, which is started again after each.", "N"
    ),
    "seed": CommandOption(int, "Of the random faults. [0]", "N"),
    "resume": CommandOption(bool, "Start the command again after each fault, to see whether it resumes. [on]"),
    "json": CommandOption(str, "File of the results.", "FILE"),
    "markdown": CommandOption(str, "File of the table.", "FILE"),
    "cwd": CommandOption(str, "Folder in which the script runs. [this one]", "FOLDER"),
    "limit_s": CommandOption(float, "Limit of each start of the ranks, in seconds. [600]", "SECONDS"),
}
# With the planner, which measures, each run deals samples in another way, and weights differ by rounding. The limit for
# hangs is short to save time.
DEFAULTS = {"num_gpus": 2, "max_restarts": 0, "hang_timeout_s": 10.0, "balance": "off"}


@dataclass(frozen=True)
class Judge:
    """The command: what it compares with, and what it lets a run do.

    Args:
        folder: Its private folder.
        scene: Of the run without faults.
        whole: What that run did.
        cold_s: Seconds from its start to its first step.
        options: Options of every run.
        resumes: The command is started again after each fault.
    """

    folder: Path
    scene: Scene
    whole: RunTrace
    cold_s: float
    options: Mapping[str, object]
    resumes: bool

    def try_out(self, trial: Trial) -> FaultRow:
        """Runs the script with the faults of one row, and again without, and judges what came of it."""
        max_restarts = max(trial.num_restarts, int(str(self.options["max_restarts"])))
        scene = replace(self.scene, folder=self.folder / "fault", limit_s=self.scene.limit_s * (1 + max_restarts))
        shutil.rmtree(scene.folder, ignore_errors=True)
        options = {**self.options, "max_restarts": max_restarts, "resume": "auto" if self.resumes else None}
        ended = scene.run(trial.faults, options)
        trace = RunTrace.read(scene.records)
        row = FaultRow(trial.name, ended.told[-1] if ended.told else "", None, ended.code, ended.num_orphans)
        planted = trace.of("planted")
        if not planted and ended.code == 0:
            row.note = "not met: the training has no such phase behind that step"
            return row
        if not planted:
            row.reasons.append(f"ended with {ended.code} before the fault\n{_tail(ended)}")
            return row
        self._judge_end(row, trial, ended, trace)
        if self.resumes and ended.code != 0:
            again = scene.run((), options)
            trace = RunTrace.read(scene.records)
            first_s = trace.first_step_s(again.start_s)
            row.num_orphans += again.num_orphans
            if again.code != 0:
                row.reasons.append(f"started again, it ended with {again.code}\n{_tail(again)}")
                return row
            if first_s is not None:
                self._judge_start(row, first_s - again.start_s, 0.0)
        if row.new_step_s is not None:
            row.from_step = int(trace.of("begin")[-1]["step"])
        if self.resumes or ended.code == 0:
            self._judge_work(row, trace, scene.records)
        return row

    def _judge_end(self, row: FaultRow, trial: Trial, ended: Ended, trace: RunTrace) -> None:
        planted = trace.of("planted")
        if ended.code is None:
            row.reasons.append(f"did not end within {self.scene.limit_s:g} s for each start\n{_tail(ended)}")
        if row.num_orphans:
            row.reasons.append(f"{row.num_orphans} processes were left behind")
        if len(trial.faults) > 1:
            row.told = f"{len(planted)} faults, {len(ended.told)} messages; the last: {row.told}"
            if len(planted) < len(trial.faults):
                row.reasons.append(f"met only {len(planted)} of {len(trial.faults)} faults\n{_tail(ended)}")
        following_s = [*(fault["time_s"] for fault in planted[1:]), math.inf]
        for fault, next_s in zip(planted, following_s, strict=True):
            end = KINDS[fault["kind"]]
            hang_timeout_s = float(str(self.options["hang_timeout_s"]))
            if not trace.has_stepped(fault):
                hang_timeout_s *= LONGEST_FACTOR  # Up to its first step a rank may be filling its caches.
            bound_s = limit_s(end, hang_timeout_s=hang_timeout_s, grace_s=self._grace_s)
            step_s = trace.first_step_s(fault["time_s"])
            if step_s is not None and step_s > next_s:
                continue  # This start met its fault before its first step.
            if step_s is not None:
                self._judge_start(row, step_s - fault["time_s"], bound_s or 0.0)
            elif ended.code != 0 or end is not End.NONE:
                row.ended_s = ended.end_s - fault["time_s"]
                if bound_s is not None and row.ended_s > bound_s:
                    row.reasons.append(f"ended after {row.ended_s:.1f} s; at most {bound_s:g} s were expected")

    def _judge_start(self, row: FaultRow, took_s: float, bound_s: float) -> None:
        row.new_step_s = max(took_s, row.new_step_s or 0.0)
        expected_s = bound_s + 2 * self.cold_s
        if took_s > expected_s:
            row.reasons.append(f"first new step after {took_s:.1f} s; at most {expected_s:.1f} s were expected")

    def _judge_work(self, row: FaultRow, trace: RunTrace, records: Path) -> None:
        row.lost, row.repeated = compare_samples(self.whole, trace)
        row.difference = compare_weights(self.scene.records, records)
        if row.lost or row.repeated:
            row.reasons.append(f"{row.lost} samples lost, {row.repeated} repeated")
        if row.difference is None or row.difference > ROUNDING:
            row.reasons.append(f"weights differ from those of the run without faults by {row.difference}")

    @property
    def _grace_s(self) -> float:
        return float(self.whole.of("begin")[0]["config"]["grace_s"])


def run_chaos(options: argparse.Namespace, program: Sequence[str]) -> int:
    """Runs `program` once without faults and once with each, prints the table and writes what was asked for.

    Args:
        options: What the command line gave; None = not given.
        program: The script and its arguments, or `-m`, a module and its arguments.

    Returns:
        0 where every run ended or went on as it should, 1 where one did not, the script's own exit code where it fails
        without a fault.

    Raises:
        ConfigError: An option or a fault that cannot be used.
        SetupError: Started in a rank, or the script trained nothing that could be followed.
    """
    if read_identity(os.environ) is not None:
        raise SetupError("chaos starts its ranks itself, but is a rank here.", hint="Run it without a launcher.")
    given = {name: getattr(options, name) for name in command_options("chaos")}
    run_options = {**DEFAULTS, **{name: value for name, value in given.items() if value is not None}}
    config = MultiGPUConfig.resolve(run_options)
    if (config.num_gpus or 0) < 2:
        raise ConfigError("chaos needs at least 2 ranks.", hint="Give --num-gpus 2.")
    named = None if options.faults in (None, "all") else [parse_fault(text) for text in options.faults.split(",")]
    if named and max(fault.rank for fault in named) >= (config.num_gpus or 0):
        raise ConfigError(f"--faults {options.faults}: there are {config.num_gpus} ranks.", hint="Count them from 0.")
    # A shell script ignores SIGINT for background jobs, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fixed = {"WANDB_MODE": "disabled", "PYTHONHASHSEED": "0"}
    environment = {**os.environ, **file_variables(os.environ), **fixed}
    with private_dir() as folder, exit_on_signal(), Progress("chaos") as progress:
        limit_of_run_s = options.limit_s or 600.0
        scene = Scene(folder / "whole", program, environment, options.cwd, limit_of_run_s)
        progress.say(f"the run without faults, at most {limit_of_run_s:g} s, which tells how long the others take")
        progress.show("the run without faults", 0, 1)
        since_ns = time.time_ns()
        ended = scene.run((), run_options)
        progress.clear()
        if ended.code != 0:
            print(f"{_tail(ended)}\nchaos: without a fault the run ended with {ended.code}.", file=sys.stderr)
            return 1 if ended.code is None else 128 - ended.code if ended.code < 0 else ended.code
        judge = _prepare(folder, scene, ended, run_options, resumes=options.resume is not False)
        _tell_of_written(progress, written_since(Path(options.cwd or "."), since_ns))
        trials = _trials(options, named, judge, config.num_gpus or 0)
        rows = _try_all(trials, judge, ended, progress)
    return _report(rows, judge, options)


def _trials(options: argparse.Namespace, named: Sequence[Fault] | None, judge: Judge, num_ranks: int) -> list[Trial]:
    files = _checkpoint_files(judge.whole)
    if options.random is not None:
        return [random_trial(options.random, options.seed or 0, judge.whole.num_steps, num_ranks)]
    if named is None:
        return all_trials(judge.whole.num_steps, num_ranks, files)
    return [torn_trial(f.step, files) if f.kind == "corrupt" else Trial(str(f), (f,)) for f in named]


def _try_all(trials: Sequence[Trial], judge: Judge, ended: Ended, progress: Progress) -> list[FaultRow]:
    """Tries every row, and says how long that takes before and meanwhile.

    Args:
        ended: The run without faults.
    """
    run_s = ended.end_s - ended.start_s
    hang_timeout_s = float(str(judge.options["hang_timeout_s"]))
    costs = Costs(run_s, judge.cold_s, judge.whole.num_steps, hang_timeout_s, judge.resumes)
    expected_s = list(map(costs.of, trials))
    progress.say(
        f"it took {run_s:.1f} s, {judge.cold_s:.1f} s of that to the end of the first step; "
        f"{len(trials)} more with faults take {about(sum(expected_s))}"
    )
    rows: list[FaultRow] = []
    took_s: list[float] = []
    for number, trial in enumerate(trials, 1):
        progress.begin(number, len(trials), trial.name, left_s(expected_s, took_s))
        begin_s = time.monotonic()
        rows.append(judge.try_out(trial))
        took_s.append(time.monotonic() - begin_s)
        for reason in rows[-1].reasons:
            progress.say(f"{trial.name}: NOT AS EXPECTED: {reason}", "bold red")
    return rows


def _tell_of_written(progress: Progress, files: Sequence[str]) -> None:
    if not files:
        return
    others = f" and {len(files) - 1} more were" if len(files) > 1 else " was"
    progress.say(
        f"while it ran, {files[0]}{others} written in the working folder: what a Trainer saves is turned aside, "
        "what the script saves itself is not, and each run does it again; {run} in its arguments stands for a new "
        "folder",
        "yellow",
    )


def _prepare(folder: Path, scene: Scene, ended: Ended, run_options: Mapping[str, object], *, resumes: bool) -> Judge:
    whole = RunTrace.read(scene.records)
    first_s = whole.first_step_s(ended.start_s)
    if first_s is None:
        raise SetupError(
            "The script ended without a training that chaos could follow.",
            hint="It must call train() of a transformers Trainer on every rank.",
        )
    begun = whole.of("begin")[0]
    for name, value in run_options.items():
        if begun["config"][name] != value:
            raise ConfigError(
                f"chaos asks for {name}={value!r}, but the script's enable_multi_gpu() says {begun['config'][name]!r}.",
                hint="Leave it out of the script's line while its faults are tried.",
            )
    if not Path(begun["output_dir"]).is_relative_to(scene.work.resolve()):
        raise ConfigError(
            f"The script saves in {begun['output_dir']}, where runs would find each other's checkpoints.",
            hint="Its Trainer must take it from TrainingArguments; or write {run} for it in the script's arguments.",
        )
    return Judge(folder, scene, whole, first_s - ended.start_s, run_options, resumes)


def _checkpoint_files(whole: RunTrace) -> list[str]:
    """Names of a checkpoint's files."""
    from unsloth_multigpu.tools.chaos.actions import newest_checkpoint

    newest = newest_checkpoint(whole.of("begin")[0]["output_dir"])
    return [] if newest is None else sorted(str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file())


def _report(rows: Sequence[FaultRow], judge: Judge, options: argparse.Namespace) -> int:
    is_good = not any(row.reasons for row in rows)
    if options.markdown:
        Path(options.markdown).write_text(markdown(rows), encoding="utf-8")
    if options.json:
        facts = {"schema_version": 1, "command": list(judge.scene.program), "cold_start_s": judge.cold_s}
        result = {**facts, "options": dict(judge.options), "good": is_good, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json_text(result), encoding="utf-8")
    screen = Screen()
    show(rows, screen)
    screen.line(f"cold start to the first step: {judge.cold_s:.1f} s")
    bad = [row.fault for row in rows if row.reasons]
    told = f"NOT AS EXPECTED: {', '.join(bad)}" if bad else "Every run ended or went on as it should."
    screen.line(told, "bold red" if bad else "bold green")
    return 0 if is_good else 1


def _tail(ended: Ended) -> str:
    return last_lines(ended.output)
