"""`unsloth-multigpu bench`: measures the same training in several ways on this machine.

Each arm runs in processes of its own and with a time limit.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.cli.command import Command
from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import LaunchError, SetupError
from unsloth_multigpu.tools.bench.arm import ARMS, NUM_WARMUP_ON_DEVICE, Arm, BenchOptions, arm_environment
from unsloth_multigpu.tools.bench.bench_result import Record, conditions, show_results, summarize
from unsloth_multigpu.tools.script_program import run_recorded
from unsloth_multigpu.wire.child import exit_on_signal
from unsloth_multigpu.wire.run import private_dir
from unsloth_multigpu.words import how_ended

Options = BenchOptions


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Runs every arm in every round, and prints the result of the complete rounds. Returns 1 if an arm failed.

    Raises ConfigError for an invalid option, SetupError if this machine does not have the requested devices.
    """
    options = on_device(own)
    with exit_on_signal(), Progress("bench") as progress:
        runs, failed = run_rounds(options, progress)
    num_rounds, remarks = len(next(iter(runs.values()))), list[str]()
    if failed is not None:
        progress.say(f"error: {failed}")
        remarks.append(f"stopped: an arm failed in round {num_rounds + 1} of {options.repeats}")
    if num_rounds:
        _publish(dataclasses.replace(options, repeats=num_rounds), remarks, runs)
    return 0 if failed is None else 1


COMMAND = Command("bench", "measure one process, this package, torchrun and others side by side", Options, run)


def on_device(options: BenchOptions) -> BenchOptions:
    """Resolves device="auto", and sets whether ranks share a GPU.

    Raises SetupError if this machine does not have the requested devices.
    """
    from unsloth_multigpu.start import visible_accelerators

    kind, count = ("cpu", 0) if options.device == "cpu" else visible_accelerators()
    if options.device == "cpu" or (options.device == "auto" and not count):
        return dataclasses.replace(options, device="cpu", warmup=options.num_warmup)
    if kind != "cuda" or not count:
        seen = f"{count} devices of kind {kind}" if count else "no GPU"
        raise SetupError(
            f"--device {options.device}: bench measures CUDA devices and CPUs, and torch sees {seen}.",
            hint="Set --device cpu, or check the driver and the installed torch.",
        )
    if 1 < count < options.ranks:
        raise SetupError(
            f"--ranks {options.ranks}, but {count} GPUs are visible.",
            hint=f"Set --ranks {count}; or CUDA_VISIBLE_DEVICES=0, for ranks that share one GPU.",
        )
    warmup = NUM_WARMUP_ON_DEVICE if options.warmup is None else options.warmup
    is_shared = count == 1 and options.ranks > 1
    return dataclasses.replace(options, device=kind, warmup=warmup, is_gpu_shared=is_shared)


def run_rounds(options: BenchOptions, progress: Progress) -> tuple[dict[str, list[list[Record]]], LaunchError | None]:
    """Runs every arm in every round.

    Returns `records[arm][round][rank]` of the complete rounds, and the error that ended the last round, or None.
    Raises SetupError as `make_folder`.
    """
    from unsloth_multigpu.tools.bench.bench_worker import make_folder  # Imports torch.

    names = options.arms.split(",")
    records: dict[str, list[list[Record]]] = {name: [] for name in names}
    numbers = itertools.count(1)
    with private_dir() as root:
        options = make_folder(options, root)
        for number in range(options.repeats):
            # Each round starts with another arm, because a run after a pause, or after a large run, is slower.
            first = number % len(names)
            done = {}
            for name in [*names[first:], *names[:first]]:
                # ".arm", so that no path is a prefix of another: paths identify the processes of an arm.
                folder = root / f"{number + 1}_{name}.arm"
                folder.mkdir()
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
    """Trains once in an empty folder, and returns the records of the ranks, rank 0 first.

    Raises LaunchError, with the last lines of the output, if the run failed or took longer than `options.timeout_s`.
    """
    file, limit_s = folder / "settings.json", options.timeout_s
    file.write_text(json.dumps({"arm": arm.name, "options": dataclasses.asdict(options)}), encoding="utf-8")
    command, environment = [*arm.command(options), str(file)], arm_environment(arm, options, folder, os.environ)
    code, records, tail = run_recorded(command, environment, folder, limit_s=limit_s, cwd=folder)
    problem = f"did not end within {limit_s:g} s" if code is None else how_ended(code) if code else ""
    if not problem and len(records) < arm.num_processes(options):
        problem = f"left results of {len(records)} of {arm.num_processes(options)} ranks"
    if problem:
        tail = textwrap.indent(tail, "  | ")
        raise LaunchError(
            f"The arm {arm.name} ({arm.text}) {problem}. The end of its output:\n{tail}",
            hint=f"Run it alone: unsloth-multigpu bench --arms {arm.name}",
        )
    return list(records)


def _publish(options: BenchOptions, remarks: Sequence[str], runs: Mapping[str, list[list[Record]]]) -> None:
    """Prints the table, or all figures as JSON."""
    results = summarize(runs, options)
    device = next(iter(runs.values()))[0][0]["device"]
    lines = [*conditions(options, device), *remarks]
    if not options.json:
        show_results(Screen(), lines, results)
        return
    outcome = {
        "options": dataclasses.asdict(options),
        "conditions": lines,
        "results": [dataclasses.asdict(result) for result in results],
        "runs": runs,
    }
    Screen().json(outcome)
