"""`unsloth-multigpu chaos`: what does a script's training do when a rank dies, hangs, or is asked to stop?"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.launch.watchdog import LONGEST_FACTOR
from unsloth_multigpu.options import MultiGPUConfig, command_options, file_variables, variable
from unsloth_multigpu.tools.chaos.fault import KINDS, End, limit_s, parse_fault
from unsloth_multigpu.tools.chaos.plan import Trial, all_trials, random_trial, torn_trial
from unsloth_multigpu.tools.chaos.result import (
    ROUNDING,
    FaultRow,
    RunTrace,
    compare_samples,
    compare_weights,
    markdown,
    text_table,
)
from unsloth_multigpu.tools.chaos.run import Ended, Scene
from unsloth_multigpu.tools.doctor.probe import exit_on_sigterm
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.identity import read_identity

# Options that a run does not have, or that mean something else here: type, text of --help. See cli.main.
OWN_OPTIONS: dict[str, tuple[type[Any], str]] = {
    "faults": (str, '"all", or kind@rank:step[:train|save|evaluate],... with "all" for every rank. [all]'),
    "random": (int, "Instead of --faults, this many random faults over one run, which is started again after each."),
    "seed": (int, "Of the random faults. [0]"),
    "resume": (bool, "Start the command again after each fault, to see whether it resumes. [on]"),
    "json": (str, "File of the results."),
    "markdown": (str, "File of the table."),
    "cwd": (str, "Folder in which the script runs; its output then belongs into {run} in its arguments. [a new one]"),
    "limit_s": (float, "Limit of each start of the ranks, in seconds. [600]"),
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
    fixed = {variable("log_dir"): "logs", "WANDB_MODE": "disabled", "PYTHONHASHSEED": "0"}
    environment = {**os.environ, **file_variables(os.environ), **fixed}
    with private_dir() as folder, exit_on_sigterm():
        scene = Scene(folder / "whole", program, environment, options.cwd, options.limit_s or 600.0)
        _say("the run without faults")
        ended = scene.run((), run_options)
        if ended.code != 0:
            print(f"{_tail(ended)}\nchaos: without a fault the run ended with {ended.code}.", file=sys.stderr)
            return 1 if ended.code is None else 128 - ended.code if ended.code < 0 else ended.code
        judge = _prepare(folder, scene, ended, run_options, resumes=options.resume is not False)
        num_steps, num_ranks = judge.whole.num_steps, config.num_gpus or 0
        files = _checkpoint_files(judge.whole)
        if options.random is not None:
            trials = [random_trial(options.random, options.seed or 0, num_steps, num_ranks)]
        elif named is None:
            trials = all_trials(num_steps, num_ranks, files)
        else:
            trials = [torn_trial(f.step, files) if f.kind == "corrupt" else Trial(str(f), (f,)) for f in named]
        rows = []
        for number, trial in enumerate(trials, 1):
            _say(f"{number} of {len(trials)}: {trial.name}")
            rows.append(judge.try_out(trial))
            for reason in rows[-1].reasons:
                _say(f"NOT AS EXPECTED: {reason}")
    return _report(rows, judge, options)


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
            hint="Let it save in a relative folder, or write {run} for it in its arguments.",
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
    print(text_table(rows))
    print(f"cold start to the first step: {judge.cold_s:.1f} s")
    bad = [row.fault for row in rows if row.reasons]
    print(f"NOT AS EXPECTED: {', '.join(bad)}" if bad else "Every run ended or went on as it should.")
    return 0 if is_good else 1


def _tail(ended: Ended, num_lines: int = 25) -> str:
    return "\n".join(ended.output.splitlines()[-num_lines:])


def _say(text: str) -> None:
    print(f"chaos: {text}", file=sys.stderr, flush=True)
