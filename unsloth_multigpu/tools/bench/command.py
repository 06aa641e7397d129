"""`unsloth-multigpu bench`: the same training in several ways, side by side on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.errors import ConfigError, LaunchError, SetupError
from unsloth_multigpu.options import ENV_PREFIX
from unsloth_multigpu.tools.bench.arm import ARMS, DEFAULT_ARMS, Arm, choose_arms, num_processes, part_available
from unsloth_multigpu.tools.bench.federated_option import check_not_federated
from unsloth_multigpu.tools.bench.option import NUM_WARMUP_ON_DEVICE, BenchOptions
from unsloth_multigpu.tools.bench.run import tell
from unsloth_multigpu.tools.bench.strategy_arm import STRATEGIES
from unsloth_multigpu.tools.bench.unsloth import made_model
from unsloth_multigpu.tools.html_page import check_libraries
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.versions import installed_version
from unsloth_multigpu.wire.process import exit_on_signal

if TYPE_CHECKING:
    from unsloth_multigpu.tools.bench.result import ArmResult, RankRecord
    from unsloth_multigpu.tools.bench.strategy_result import StrategyResult

_TOGETHER = "all arms in turns"
_LIBRARIES = ("unsloth-multigpu", "torch", "transformers", "accelerate", "peft", "datasets")


def run_bench(arguments: argparse.Namespace) -> int:
    """Runs every arm in every round, and prints a table of the rounds in which none failed.

    Returns:
        0, or 1 if an arm failed.

    Raises:
        ConfigError: An option has a value that cannot be used.
        SetupError: This machine lacks what was asked for.
    """
    from unsloth_multigpu.tools.bench.data import make_rows

    if arguments.federated is not None:
        from unsloth_multigpu.tools.bench.federated import run_federated

        return run_federated(arguments)
    check_not_federated(arguments)
    chosen = _chosen_arms(arguments)
    options = BenchOptions.from_arguments(arguments, [arm.name for arm in chosen])
    make_rows(options)  # What it raises comes before a device is asked for.
    check_outputs(arguments.json, arguments.report)
    options = _on_device(options, is_warm=arguments.warmup is not None or options.num_epochs is not None)
    num_tokens = sum(map(len, make_rows(options)))
    arms, skipped = part_available(chosen, options)
    if not arms:
        raise SetupError("; ".join(skipped) + ".", hint="Choose other arms.")
    options = dataclasses.replace(options, arms=tuple(arm.name for arm in arms))
    for line in skipped:
        tell(line)
    with exit_on_signal(), made_model(options, arms[0]) as ready:
        runs, failed = _run_rounds(arms, ready)
    if failed is not None:
        tell(f"error: {failed}")
        num_rounds = len(runs[arms[0].name])
        skipped.append(f"stopped: an arm failed in round {num_rounds + 1} of {options.num_repeats}")
        options = dataclasses.replace(options, num_repeats=num_rounds)
    if options.num_repeats:
        _publish(arguments, options, num_tokens, skipped, runs)
    return 0 if failed is None else 1


def _chosen_arms(arguments: argparse.Namespace) -> list[Arm]:
    if arguments.strategies is None:
        names = ",".join(DEFAULT_ARMS) if arguments.arms is None else arguments.arms
        return choose_arms("--arms", names, ARMS)
    every = ",".join(STRATEGIES)
    return choose_arms("--strategies", every if arguments.strategies == "all" else arguments.strategies, STRATEGIES)


def _run_rounds(
    arms: Sequence[Arm], options: BenchOptions
) -> tuple[dict[str, list[list[RankRecord]]], LaunchError | None]:
    """`runs[arm][round]` of the rounds in which every arm ran to its end, and what ended the last one early."""
    from unsloth_multigpu.tools.bench import run as bench_run
    from unsloth_multigpu.tools.bench.turn import run_together

    by_name = {arm.name: arm for arm in arms}

    def run(name: str, folder: Path, **turns: Any) -> list[RankRecord]:
        return bench_run.run_arm(by_name[name], options, folder, **turns)

    def run_round(names: Sequence[str], folder: Path, label: str) -> dict[str, list[RankRecord]]:
        num_ranks = {name: num_processes(by_name[name], options) for name in names}
        folders = {name: bench_run.arm_folder(folder, name) for name in names}

        def run_in_turns(name: str, check: Callable[[], None]) -> list[RankRecord]:
            return run(name, folders[name], turns=folder, check=check)

        num_steps = options.num_warmup + options.num_steps
        with pace.told(label, _TOGETHER):
            return run_together(num_ranks, num_steps, folder, options.timeout_s, run_in_turns)

    is_together = options.interleave == "steps"
    with bench_run.Pace([_TOGETHER] if is_together else list(by_name), options.num_repeats) as pace:
        return bench_run.run_rounds(
            list(by_name), options.num_repeats, run_round if is_together else bench_run.one_by_one(run, pace)
        )


def _publish(
    arguments: argparse.Namespace,
    options: BenchOptions,
    num_tokens: int,
    remarks: Sequence[str],
    runs: dict[str, list[list[RankRecord]]],
) -> None:
    """Prints the table, and writes the files that were asked for."""
    from unsloth_multigpu.tools.bench.result import summarize
    from unsloth_multigpu.tools.bench.strategy_result import strategy_tables, summarize_strategies
    from unsloth_multigpu.tools.bench.table import conditions, result_table, show_result

    ranks = [rank for rounds in runs.values() for ranks in rounds for rank in ranks]
    devices = ", ".join(sorted({rank.device for rank in ranks}))
    num_threads = " or ".join(map(str, sorted({rank.num_threads for rank in ranks})))
    is_learning = options.num_epochs is not None
    # Training is chaotic: what rounding changes grows from step to step.
    num_compared = options.num_steps if is_learning else None
    results = summarize(runs, options.num_warmup, num_compared, meets=options.interleave == "steps")
    learned = summarize_strategies(runs, options) if is_learning else []
    tables = strategy_tables(learned, {r.name: r for r in results}) if is_learning else [result_table(results)]
    lines = [*machine_lines(), *conditions(options, num_tokens, devices, num_threads), *variable_lines(), *remarks]
    show_result(lines, tables)
    outcome = json_text(_outcome(options, lines, results, learned, runs))
    if arguments.json:
        Path(arguments.json).write_text(outcome, encoding="utf-8")
    if arguments.report:
        from unsloth_multigpu.tools.bench.headline import headline
        from unsloth_multigpu.tools.bench.page import write_report
        from unsloth_multigpu.tools.bench.plot import draw_curves, draw_plots

        plots = draw_plots(results, runs, options.num_warmup, options.dtype)
        plots = draw_curves(learned) | plots if learned else plots
        page = write_report(Path(arguments.report), headline(results, learned, options), lines, tables, plots)
        (page.parent / "bench.json").write_text(outcome, encoding="utf-8")
        tell(f"report: {page}")


def _on_device(options: BenchOptions, *, is_warm: bool) -> BenchOptions:
    """Turns "auto" into what this machine has, and finds out whether ranks must share a card.

    Args:
        is_warm: The steps of warm-up are enough for a card, too: they were asked for.
    """
    if options.device == "cpu":
        return options
    from unsloth_multigpu.start import visible_accelerators

    kind, count = visible_accelerators()
    if kind != "cuda" or not count:
        if options.device == "auto" and count:
            what = f"This machine has {kind}, and bench measures CUDA devices and CPUs."
            raise SetupError(what, hint="Give --device cpu.")
        if options.device == "auto":
            return dataclasses.replace(options, device="cpu")
        raise SetupError(
            f"--device cuda, but this machine has {count} CUDA device(s).",
            hint="Use --device cpu, or check the driver and the installed torch.",
        )
    if 1 < count < options.num_ranks:
        raise SetupError(
            f"--ranks {options.num_ranks}, but {count} GPUs are visible.",
            hint=f"Give --ranks {count}; or CUDA_VISIBLE_DEVICES=0, for ranks that share one card.",
        )
    num_warmup = options.num_warmup if is_warm else max(NUM_WARMUP_ON_DEVICE, options.num_warmup)
    is_shared = count == 1 and options.num_ranks > 1
    return dataclasses.replace(options, device="cuda", num_warmup=num_warmup, is_card_shared=is_shared)


def check_outputs(json_file: str | None, report: str | None) -> None:
    """Finds out before the measurement whether its result can be kept."""
    if report:
        check_libraries()
    for flag, path in (("--json", json_file and Path(json_file).parent), ("--report", report and Path(report))):
        if not path:
            continue
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Tried, since what the permissions say does not hold for root, nor on every file system.
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            raise ConfigError(f"{flag}: {error}", hint="Name a folder that can be written.") from error
    if json_file and Path(json_file).is_dir():
        raise ConfigError(f"--json {json_file}: this is a folder.", hint="Name a file.")


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


def _outcome(
    options: BenchOptions,
    lines: Sequence[str],
    results: Sequence[ArmResult],
    learned: Sequence[StrategyResult],
    runs: dict[str, list[list[RankRecord]]],
) -> dict[str, Any]:
    return {
        "options": dataclasses.asdict(options),
        "conditions": list(lines),
        "results": [dataclasses.asdict(result) for result in results],
        **({"strategies": [dataclasses.asdict(result) for result in learned]} if learned else {}),
        "runs": {name: [[dataclasses.asdict(r) for r in ranks] for ranks in rounds] for name, rounds in runs.items()},
    }
