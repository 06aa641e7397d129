"""`unsloth-multigpu bench`: the same training in several ways, side by side on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import ConfigError, LaunchError, SetupError
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.row import CommandOption
from unsloth_multigpu.tools.bench import option
from unsloth_multigpu.tools.bench import run as bench_run
from unsloth_multigpu.tools.bench.arm import (
    ARMS,
    DEFAULT_ARMS,
    STRATEGIES,
    choose_names,
    find_arm,
    num_processes,
    part_available,
)
from unsloth_multigpu.tools.bench.data import make_rows
from unsloth_multigpu.tools.bench.option import NUM_WARMUP_ON_DEVICE, BenchOptions, options_table
from unsloth_multigpu.tools.bench.unsloth import made_model
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.wire.process import exit_on_signal

if TYPE_CHECKING:
    from unsloth_multigpu.tools.bench.result import RankRecord

_TOGETHER = "all arms in turns"
_LIBRARIES = ("unsloth-multigpu", "torch", "transformers", "accelerate", "peft", "datasets")


def bench_table() -> dict[str, CommandOption]:
    """Every option: name -> what it is."""
    group = "what is compared"
    arms, strategies = ("; ".join(f"{a.name}: {a.text}" for a in known.values()) for known in (ARMS, STRATEGIES))
    others = ", ".join(name for name in ARMS if name not in DEFAULT_ARMS)
    return {
        option.ARMS: CommandOption(str, f"{arms} [all but {others}]", "A,B", group=group),
        option.STRATEGIES: CommandOption(
            str,
            f'in place of arms ways in which gradients meet, or "all"; the model learns a text. {strategies}',
            "A,B",
            group=group,
        ),
        option.FEDERATED: CommandOption(
            str,
            'in place of arms ways to train the same federated clients, or "all": slots:N, a process for each of N '
            "clients at a time, and threads:N, one process; threads need a model for each client",
            "A,B",
            group=group,
        ),
        **options_table(),
        "json": CommandOption(str, "write all figures there", "FILE", group="measurement"),
    }


def run_bench(arguments: argparse.Namespace) -> int:
    """Runs every arm in every round, and prints a table of the rounds in which none failed.

    Returns:
        0, or 1 if an arm failed.

    Raises:
        ConfigError: An option has a value that cannot be used.
        SetupError: This machine lacks what was asked for.
        DivergenceError: Two ways to train federated clients trained other weights.
    """
    options = BenchOptions.from_arguments(arguments)
    named = getattr(arguments, options.kind)
    check_output(arguments.json)
    if options.kind == option.FEDERATED:
        from unsloth_multigpu.tools.bench.federated import run_federated

        return run_federated(named, options, arguments.json)
    known = STRATEGIES if options.is_learning else ARMS
    usual = ",".join(STRATEGIES if options.is_learning else DEFAULT_ARMS)
    names = choose_names(options.kind, usual if named in (None, "all") else named, known.__contains__, ", ".join(known))
    options = _on_device(options, is_warm=arguments.warmup is not None or options.is_learning)
    names, skipped = part_available(names, options)
    if not names:
        raise SetupError("; ".join(skipped) + ".", hint="Choose other arms.")
    options = dataclasses.replace(options, arms=names)
    for line in skipped:
        bench_run.tell(line)
    with exit_on_signal(), made_model(options) as ready:
        runs, failed = _run_rounds(ready)
    num_rounds = len(runs[names[0]])
    if failed is not None:
        bench_run.tell(f"error: {failed}")
        skipped.append(f"stopped: an arm failed in round {num_rounds + 1} of {options.repeats}")
    if num_rounds:
        _publish(arguments.json, dataclasses.replace(options, repeats=num_rounds), skipped, runs)
    return 0 if failed is None else 1


def _run_rounds(options: BenchOptions) -> tuple[dict[str, list[list[RankRecord]]], LaunchError | None]:
    """`runs[arm][round]` of the rounds in which every arm ran to its end, and what ended the last one early."""
    from unsloth_multigpu.tools.bench.turn import run_together

    def run(name: str, folder: Path, **turns: Any) -> list[RankRecord]:
        return bench_run.run_arm(find_arm(name), options, folder, **turns)

    def run_round(names: Sequence[str], folder: Path, label: str) -> dict[str, list[RankRecord]]:
        num_ranks = {name: num_processes(find_arm(name), options) for name in names}
        folders = {name: bench_run.arm_folder(folder, name) for name in names}

        def run_in_turns(name: str, check: Callable[[], None]) -> list[RankRecord]:
            return run(name, folders[name], turns=folder, check=check)

        with pace.told(label, _TOGETHER):
            return run_together(num_ranks, options.warmup + options.steps, folder, options.timeout_s, run_in_turns)

    is_together = options.interleave == "steps"
    with bench_run.Pace([_TOGETHER] if is_together else options.arms, options.repeats) as pace:
        return bench_run.run_rounds(
            options.arms, options.repeats, run_round if is_together else bench_run.one_by_one(run, pace)
        )


def _publish(
    file: str | None, options: BenchOptions, remarks: Sequence[str], runs: Mapping[str, list[list[RankRecord]]]
) -> None:
    """Prints the table, and writes the file that was asked for."""
    from unsloth_multigpu.tools.bench.result import summarize
    from unsloth_multigpu.tools.bench.table import conditions, result_tables, show_result

    ranks = [rank for rounds in runs.values() for ranks in rounds for rank in ranks]
    devices = ", ".join(sorted({rank.device for rank in ranks}))
    num_threads = " or ".join(map(str, sorted({rank.num_threads for rank in ranks})))
    results = summarize(runs, options)
    num_tokens = sum(map(len, make_rows(options)))
    lines = [*machine_lines(), *conditions(options, num_tokens, devices, num_threads), *variable_lines(), *remarks]
    show_result(lines, result_tables(results))
    if file:
        outcome = {
            "options": dataclasses.asdict(options),
            "conditions": lines,
            "results": [dataclasses.asdict(result) for result in results],
            "runs": {n: [[dataclasses.asdict(r) for r in ranks] for ranks in rounds] for n, rounds in runs.items()},
        }
        Path(file).write_text(json_text(outcome), encoding="utf-8")


def _on_device(options: BenchOptions, *, is_warm: bool) -> BenchOptions:
    """Turns "auto" into what this machine has, and finds out whether ranks must share a card.

    Args:
        is_warm: The steps of warm-up are enough for a card, too: they were asked for.
    """
    device, count = find_device(options.device)
    if device == "cpu":
        return dataclasses.replace(options, device=device)
    if 1 < count < options.ranks:
        raise SetupError(
            f"--ranks {options.ranks}, but {count} GPUs are visible.",
            hint=f"Give --ranks {count}; or CUDA_VISIBLE_DEVICES=0, for ranks that share one card.",
        )
    warmup = options.warmup if is_warm else max(NUM_WARMUP_ON_DEVICE, options.warmup)
    is_shared = count == 1 and options.ranks > 1
    return dataclasses.replace(options, device=device, warmup=warmup, is_card_shared=is_shared)


def find_device(asked: str) -> tuple[str, int]:
    """The kind of device that is measured, and how many of it this machine has."""
    if asked == "cpu":
        return asked, 0
    from unsloth_multigpu.start import visible_accelerators

    kind, count = visible_accelerators()
    if kind == "cuda" and count:
        return kind, count
    if asked == "auto" and count:
        what = f"This machine has {kind}, and bench measures CUDA devices and CPUs."
        raise SetupError(what, hint="Give --device cpu.")
    if asked == "auto":
        return "cpu", 0
    raise SetupError(
        f"--device cuda, but this machine has {count} CUDA device(s).",
        hint="Use --device cpu, or check the driver and the installed torch.",
    )


def check_output(file: str | None) -> None:
    """Finds out before the measurement whether its result can be kept."""
    if not file:
        return
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        # Tried, since what the permissions say does not hold for root, nor on every file system.
        tempfile.TemporaryFile(dir=Path(file).parent).close()
    except OSError as error:
        raise ConfigError(f"--json: {error}", hint="Name a folder that can be written.") from error
    if Path(file).is_dir():
        raise ConfigError(f"--json {file}: this is a folder.", hint="Name a file.")


def machine_lines() -> list[str]:
    """Processor and libraries."""
    versions = ", ".join(f"{name} {installed_version(name)}" for name in _LIBRARIES)
    return [
        f"CPU: {_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        f"versions: Python {platform.python_version()}, {versions}",
    ]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def variable_lines() -> list[str]:
    """Options of ours that the environment sets: they change the arms that have the line."""
    mine = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(ENV_PREFIX)]
    return [f"variables: {' '.join(mine)}"] if mine else []
