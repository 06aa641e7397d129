"""One run of the script for `unsloth-multigpu chaos`: the processes that it leaves behind, and its records."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_multigpu.cli.script_runner import calls_enable
from unsloth_multigpu.options import variable
from unsloth_multigpu.tools.chaos.fault import ChaosRequest, Fault, read_records
from unsloth_multigpu.wire.process import find_marked, kill_marked, wait_after_kill

_POLL_S = 0.05
# Processes that outlive the command by more than this count as orphans.
_ORPHAN_LIMIT_S = 5.0
# The launcher's message about the end of a run. Other log lines have the same prefix.
_TOLD = re.compile(r"unsloth_multigpu: (.*(?:The other ranks were stopped|Starting all ranks again|stopped by|SIG).*)")


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
    """

    code: int | None
    start_s: float
    end_s: float
    num_orphans: int
    told: str
    output: str


@dataclass(frozen=True)
class ScriptRuns:
    """The runs of one row of the table.

    Args:
        folder: Folder of this row, for records and the script's files.
        program: The script and its arguments, or `-m`, a module and its arguments.
        environment: Variables of every run.
        limit_s: Time limit of a run.
    """

    folder: Path
    program: Sequence[str]
    environment: Mapping[str, str]
    limit_s: float

    @property
    def records(self) -> Path:
        """Folder of the ranks' records. Only the variables of this row's processes contain its path."""
        return self.folder / "records"

    @property
    def work(self) -> Path:
        """Folder for the script's checkpoints and logs, which replaces `{run}` in its arguments."""
        return self.folder / "work"

    def run(self, faults: Sequence[Fault], options: Mapping[str, object]) -> Ended:
        """Runs the script to its end, with faults to inject and options of `enable_multi_gpu`."""
        for place in (self.records, self.work):
            place.mkdir(parents=True, exist_ok=True)
        variables = {variable(name): str(value) for name, value in options.items() if value is not None}
        request = ChaosRequest(str(self.records), faults, str(self.work))
        marker, start_s = str(self.records), time.monotonic()
        process = subprocess.Popen(
            self._command(),
            env={**self.environment, **variables, **request.variables()},
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
                code = process.wait(self.limit_s)
            end_s = time.monotonic() + _ORPHAN_LIMIT_S
            while code is not None and (num_orphans := len(find_marked(marker))) and time.monotonic() < end_s:
                time.sleep(_POLL_S)
        finally:
            end_s = time.monotonic()
            kill_marked(marker)
            wait_after_kill(process)
        reader.join(_ORPHAN_LIMIT_S)
        output = b"".join(printed).decode("ascii", errors="replace").replace("\r", "\n")
        # Show redirected paths as those in the user's folder.
        for redirected in (f"{self.work}/output{Path().resolve()}", str(self.work)):
            output = output.replace(redirected, ".")
        told = [m[1] for m in map(_TOLD.match, output.splitlines()) if m]
        return Ended(code, start_s, end_s, num_orphans, told[-1] if told else "", output)

    def _command(self) -> list[str]:
        program = [argument.replace("{run}", str(self.work)) for argument in self.program]
        if program[0] != "-m":
            program[0] = os.path.abspath(program[0])
        own = [] if calls_enable(program) else ["-m", "unsloth_multigpu.cli.main", "run", "--"]
        return [sys.executable, *own, *program]


@dataclass(frozen=True)
class RunTrace:
    """Records of all ranks, with their ranks, over all starts of a row, oldest first."""

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

    def samples(self) -> dict[tuple[int, int], Counter[str]]:
        """Returns the samples of each (training, step) over all ranks. Of a repeated step, the last time counts."""
        latest = {(r["training"], r["step"], r["rank"]): Counter(r["samples"]) for r in self.of("step")}
        steps: dict[tuple[int, int], Counter[str]] = {}
        for (training, step, _), samples in latest.items():
            steps.setdefault((training, step), Counter()).update(samples)
        return steps


def compare_samples(reference: RunTrace, other: RunTrace) -> tuple[int, int]:
    """Returns the numbers of missing and of repeated samples, compared step by step with the run without faults."""
    expected, found = reference.samples(), other.samples()
    keys = expected.keys() | found.keys()
    lost = sum((expected.get(k, Counter()) - found.get(k, Counter())).total() for k in keys)
    return lost, sum((found.get(k, Counter()) - expected.get(k, Counter())).total() for k in keys)


def compare_weights(reference: RunTrace, other: RunTrace) -> float | None:
    """Returns the largest relative difference of a trained tensor; None if some are missing."""
    from unsloth_multigpu.step.sketch import difference

    expected, found = ({r["training"]: r["weights"] for r in t.of("end") if r["rank"] == 0} for t in (reference, other))
    worst = 0.0
    for training, weights in expected.items():
        others = found.get(training, {})
        if others.keys() != weights.keys():
            return None
        off = [difference([own], [others[name]], [name]).off for name, own in weights.items()]
        worst = max([worst, *(math.inf if math.isnan(value) else value for value in off)])
    return worst
