"""Runs the arms of a benchmark, each in processes of its own and with a time limit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
import textwrap
from pathlib import Path

from unsloth_multigpu.cli.screen import Progress
from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.tools.bench.arm import ARMS, Arm, arm_environment
from unsloth_multigpu.tools.bench.bench_option import BenchOptions
from unsloth_multigpu.tools.bench.bench_result import Record
from unsloth_multigpu.wire.process import run_to_end
from unsloth_multigpu.words import how_ended, last_lines

# torchrun waits up to 30 s for ranks after SIGTERM.
_TERMINATE_LIMIT_S = 35.0


def run_rounds(options: BenchOptions, progress: Progress) -> tuple[dict[str, list[list[Record]]], LaunchError | None]:
    """Runs every arm in every round.

    Returns:
        `records[arm][round][rank]` of the complete rounds, and the error that ended the last round, or None.
    """
    names = options.arms.split(",")
    records: dict[str, list[list[Record]]] = {name: [] for name in names}
    numbers = itertools.count(1)
    with tempfile.TemporaryDirectory(prefix="unsloth_multigpu_bench_") as root:
        for number in range(options.repeats):
            # Each round starts with another arm, because a run after a pause, or after a large run, is slower.
            first = number % len(names)
            done = {}
            for name in [*names[first:], *names[:first]]:
                # ".arm", so that no path is a prefix of another: paths identify the processes of an arm.
                folder = Path(root, str(number + 1), f"{name}.arm")
                folder.mkdir(parents=True)
                label = f"round {number + 1}/{options.repeats}, {name}"
                progress.begin(next(numbers), options.repeats * len(names), label)
                try:
                    done[name] = run_arm(ARMS[name], options, folder)
                except LaunchError as failed:
                    return records, failed
            for name, ranks in done.items():
                records[name].append(ranks)
    return records, None


def run_arm(arm: Arm, options: BenchOptions, folder: Path) -> list[Record]:
    """Trains once and returns the records of its ranks, rank 0 first.

    Args:
        folder: An empty folder for the run. Its path, in the environment, identifies the processes of the run.

    Raises:
        LaunchError: The run failed, or did not end within `options.timeout_s`. The message has its last lines.
    """
    file, log, limit_s = folder / "settings.json", folder / "output.log", options.timeout_s
    file.write_text(json.dumps({"arm": arm.name, "options": dataclasses.asdict(options)}), encoding="utf-8")
    with log.open("wb") as output:
        code = run_to_end(
            [*arm.command(options), str(file)],
            arm_environment(arm, options, folder, os.environ),
            output,
            marker=str(folder),  # Its TMPDIR.
            limit_s=limit_s,
            terminate_limit_s=_TERMINATE_LIMIT_S,
            cwd=folder,
        )
    problem = f"did not end within {limit_s:g} s" if code is None else how_ended(code) if code else ""
    paths = [folder / f"rank_{rank}.json" for rank in range(arm.num_processes(options))]
    missing = [path.stem for path in paths if not path.exists()]
    if problem or missing:
        problem = problem or f"left no result of {', '.join(missing)}"
        tail = textwrap.indent(last_lines(log.read_text(encoding="utf-8", errors="replace")), "  | ")
        raise LaunchError(
            f"The arm {arm.name} ({arm.text}) {problem}. The end of its output:\n{tail}",
            hint=f"Run it alone: unsloth-multigpu bench --arms {arm.name}",
        )
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
