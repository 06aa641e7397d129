"""`unsloth-multigpu chaos`: injects faults into a script's training and checks how it ends or continues."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from unsloth_multigpu.cli.command import Arguments, Command
from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.cli.script_runner import calls_enable
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.option_type import Option
from unsloth_multigpu.options import MultiGPUConfig, variable
from unsloth_multigpu.recorders.fault import Fault, all_faults, chaos_variables, limit_s, parse_fault, read_records
from unsloth_multigpu.tools.script_program import check_is_no_rank, command_of
from unsloth_multigpu.wire.child import exit_on_signal, find_marked, kill_marked, wait_after_kill
from unsloth_multigpu.wire.run import private_dir
from unsloth_multigpu.words import duration, last_lines

# Largest relative difference of a tensor that fp32 rounding explains.
ROUNDING = 1e-5
_POLL_S = 0.05
# Processes that outlive the command by more than this count as orphans.
_ORPHAN_LIMIT_S = 5.0
# The launcher's message about the end of a run. Other log lines have the same prefix.
_TOLD = re.compile(r"unsloth_multigpu: (.*(?:The other ranks were stopped|Starting all ranks again|stopped by|SIG).*)")


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
        lost, repeated: Numbers of samples that are missing or repeated, compared with the run without faults.
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
    """Runs the script with faults, and compares each run with the one without.

    Args:
        program: The script and its arguments, or `-m`, a module and its arguments.
        folder: The command's private folder.
        options: Options of every run.
        limit_s: Limit of each start of the ranks.
        reference: The run without faults.
    """

    program: Sequence[str]
    folder: Path
    options: Mapping[str, Any]
    limit_s: float
    reference: Ended

    def try_out(self, fault: Fault) -> FaultRow:
        """Runs the script with a fault, resumes it without, and evaluates the result."""
        folder, options = self.folder / "fault", {**self.options, "resume": "auto"}
        limit_of_runs_s = self.limit_s * (1 + int(options["max_restarts"]))
        shutil.rmtree(folder, ignore_errors=True)
        ended = run_script(self.program, folder, options, limit_of_runs_s, [fault])
        trace = ended.trace
        row = FaultRow(str(fault), ended.told, None, ended.code, ended.num_orphans)
        if not trace.of("injected"):
            if ended.code == 0:
                row.note = "not injected: the training has no such phase after that step"
            else:
                row.reasons.append(f"ended with {ended.code} before the fault\n{last_lines(ended.output)}")
            return row
        self._judge_end(row, ended, limit_of_runs_s)
        if ended.code != 0:
            again = run_script(self.program, folder, options, limit_of_runs_s)
            trace = again.trace
            row.num_orphans += again.num_orphans
            if again.code != 0:
                row.reasons.append(f"started again, it ended with {again.code}\n{last_lines(again.output)}")
                return row
            row.new_step_s = again.cold_start_s
        if row.new_step_s is not None:
            row.from_step = int(trace.of("begin")[-1]["step"])
        row.lost, row.repeated = compare_samples(self.reference.trace, trace)
        row.difference = compare_weights(self.reference.trace, trace)
        if row.lost or row.repeated:
            row.reasons.append(f"{row.lost} samples lost, {row.repeated} repeated")
        if row.difference is None or row.difference > ROUNDING:
            row.reasons.append(f"weights differ from those of the run without faults by {row.difference}")
        return row

    def _judge_end(self, row: FaultRow, ended: Ended, limit_of_run_s: float) -> None:
        if ended.code is None:
            row.reasons.append(f"did not end within {limit_of_run_s:g} s\n{last_lines(ended.output)}")
        if row.num_orphans:
            row.reasons.append(f"{row.num_orphans} processes were left behind")
        fault = ended.trace.of("injected")[0]
        step_s = ended.trace.first_step_s(fault["time_s"])
        if step_s is not None:  # The ranks have started again.
            row.new_step_s = step_s - fault["time_s"]
            return
        row.ended_s = ended.end_s - fault["time_s"]
        grace_s = self.reference.trace.of("begin")[0]["config"]["grace_s"]
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
    # A background job of a shell script ignores SIGINT, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with private_dir() as folder, exit_on_signal(), Progress("chaos") as progress:
        progress.say(f"the run without faults, at most {own.limit_s:g} s, to estimate the time of the others")
        progress.show("the run without faults")
        ended = run_script(program, folder / "reference", run_options, own.limit_s)
        progress.clear()
        if ended.code != 0:
            said = f"{last_lines(ended.output)}\nchaos: without a fault the run ended with {ended.code}."
            Screen(sys.stderr).line(said)
            return 1 if ended.code is None else 128 - ended.code if ended.code < 0 else ended.code
        _check_reference(ended, run_options, folder)
        judge = Judge(program, folder, run_options, own.limit_s, ended)
        rows = _try_all(named or all_faults(ended.trace.num_steps, num_ranks), judge, progress)
    return _report(rows, judge, as_json=own.json)


COMMAND = Command(
    "chaos",
    "kill, stop and starve ranks of a script, and check whether its training ends or continues as it should",
    Options,
    run,
    runs_program=True,
    defaults=DEFAULTS,
)


def _check_reference(ended: Ended, run_options: Mapping[str, Any], folder: Path) -> None:
    """Raises if the runs of this script cannot be compared."""
    if ended.cold_start_s is None:
        raise SetupError(
            "The script ended without a training that chaos could record.",
            hint="It must call train() of a transformers Trainer on every rank.",
        )
    begun = ended.trace.of("begin")[0]
    for name, value in run_options.items():
        if begun["config"][name] != value:
            raise ConfigError(
                f"chaos sets {name}={value!r}, but the script's enable_multi_gpu() sets {begun['config'][name]!r}.",
                hint="Leave it out of the script's call for chaos.",
            )
    if not Path(begun["output_dir"]).is_relative_to(folder.resolve()):
        raise ConfigError(
            f"The script saves to {begun['output_dir']}, where runs would find each other's checkpoints.",
            hint="Its Trainer must take the folder from TrainingArguments; or write {run} in the script's arguments.",
        )


def _try_all(faults: Sequence[Fault], judge: Judge, progress: Progress) -> list[FaultRow]:
    """Tries every fault, after an estimate of the time."""
    run_s = judge.reference.end_s - judge.reference.start_s
    # Twice the time of a run: one with the fault, and one that resumes.
    progress.say(
        f"it took {run_s:.1f} s, {judge.reference.cold_start_s:.1f} s of that to the end of the first step; "
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
    screen, cold_s = Screen(), judge.reference.cold_start_s
    if as_json:
        facts = {"schema_version": 1, "command": list(judge.program), "cold_start_s": cold_s}
        result = {**facts, "options": dict(judge.options), "good": not bad, "rows": [asdict(row) for row in rows]}
        screen.json(result)
        return 1 if bad else 0
    _show(rows, screen)
    screen.line(f"cold start to the first step: {cold_s:.1f} s")
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


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Args:
        code: Exit code, -N = ended by signal N, None = it exceeded the time limit.
        start_s: Time of the start, on the clock of `time.monotonic`.
        end_s: Time when its last process was gone.
        num_orphans: Processes that it left behind.
        told: The launcher's last message about the end or restart.
        output: Its whole output.
        trace: The records of all runs in its folder.
    """

    code: int | None
    start_s: float
    end_s: float
    num_orphans: int
    told: str
    output: str
    trace: RunTrace

    @property
    def cold_start_s(self) -> float | None:
        """Seconds from its start to the end of its first step; None without one."""
        first_s = self.trace.first_step_s(self.start_s)
        return None if first_s is None else first_s - self.start_s


def run_script(
    program: Sequence[str], folder: Path, options: Mapping[str, object], limit_s: float, faults: Sequence[Fault] = ()
) -> Ended:
    """Runs a script to its end, with options of `enable_multi_gpu` and faults to inject.

    `folder` is for the ranks' records and the script's checkpoints and logs, and replaces `{run}` in its arguments.
    """
    # Only the variables of this run's processes contain the path of its records.
    records, work = folder / "records", folder / "work"
    for place in (records, work):
        place.mkdir(parents=True, exist_ok=True)
    variables = {variable(name): str(value) for name, value in options.items() if value is not None}
    variables |= {"WANDB_MODE": "disabled", "PYTHONHASHSEED": "0", **chaos_variables(records, faults, work)}
    start_s = time.monotonic()
    command = command_of([argument.replace("{run}", str(work)) for argument in program])
    process = subprocess.Popen(
        # Without `script_runner`, if the script itself calls `enable_multi_gpu()`.
        [command[0], *command[3:]] if calls_enable(program) else command,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        # A pipe, because a limit on the size of files, which simulates a full disk, must not affect the output.
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    printed: list[bytes] = []
    reader = threading.Thread(target=lambda: printed.extend(process.stdout or ()), daemon=True)
    reader.start()
    code: int | None = None
    num_orphans = 0
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        end_s = time.monotonic() + _ORPHAN_LIMIT_S
        while code is not None and (num_orphans := len(find_marked(str(records)))) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
    finally:
        end_s = time.monotonic()
        kill_marked(str(records))
        wait_after_kill(process)
    reader.join(_ORPHAN_LIMIT_S)
    output = b"".join(printed).decode("utf-8", errors="replace").replace("\r", "\n")
    # Show redirected paths as those in the user's folder.
    for redirected in (f"{work}/output{Path().resolve()}", str(work)):
        output = output.replace(redirected, ".")
    told = [m[1] for m in map(_TOLD.match, output.splitlines()) if m]
    return Ended(code, start_s, end_s, num_orphans, told[-1] if told else "", output, RunTrace.read(records))


@dataclass(frozen=True)
class RunTrace:
    """Records of all ranks over all starts of a run, oldest first. Each record has its rank."""

    records: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RunTrace:
        """Reads the files of all ranks."""
        ranks = [int(path.stem.rpartition("_")[2]) for path in folder.glob("rank_*.jsonl")]
        found = [{**record, "rank": rank} for rank in ranks for record in read_records(folder, rank)]
        return cls(sorted(found, key=lambda r: float(r["time_s"])))

    def of(self, event: str) -> list[dict[str, Any]]:
        """Returns the records of one event."""
        return [record for record in self.records if record["event"] == event]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the first training."""
        return max((r["step"] for r in self.of("step") if r["training"] == 0), default=0)

    def first_step_s(self, since_s: float) -> float | None:
        """Returns the end of the first step of processes that began to train after `since_s`; None without one."""
        before = {r["pid"] for r in self.records if r["time_s"] <= since_s}
        return next((float(r["time_s"]) for r in self.of("step") if r["pid"] not in before), None)

    def samples(self) -> Counter[tuple[int, int, str]]:
        """Counts each (training, step, sample) over all ranks. Of a repeated step, the last time counts."""
        latest = {(r["training"], r["step"], r["rank"]): r["samples"] for r in self.of("step")}
        found: Counter[tuple[int, int, str]] = Counter()
        for (training, step, _), samples in latest.items():
            found.update({(training, step, sample): count for sample, count in samples.items()})
        return found


def compare_samples(reference: RunTrace, other: RunTrace) -> tuple[int, int]:
    """Returns the numbers of missing and of repeated samples, compared step by step with the run without faults."""
    expected, found = reference.samples(), other.samples()
    return (expected - found).total(), (found - expected).total()


def compare_weights(reference: RunTrace, other: RunTrace) -> float | None:
    """Returns the largest relative difference of a trained tensor; None if some are missing."""
    from unsloth_multigpu.step.comparison import difference

    expected, found = ({r["training"]: r["weights"] for r in t.of("end") if r["rank"] == 0} for t in (reference, other))
    worst = 0.0
    for training, weights in expected.items():
        others = found.get(training, {})
        if others.keys() != weights.keys():
            return None
        off = [difference([own], [others[name]], [name]).off for name, own in weights.items()]
        worst = max([worst, *(math.inf if math.isnan(value) else value for value in off)])
    return worst
