"""`unsloth-multigpu bench`: measures the same training in several ways on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.tools.bench.arm import choose_names
from unsloth_multigpu.tools.bench.bench_option import NUM_WARMUP_ON_DEVICE, BenchOptions
from unsloth_multigpu.tools.bench.bench_run import run_rounds
from unsloth_multigpu.tools.bench.unsloth_arm import made_model
from unsloth_multigpu.wire.process import exit_on_signal

if TYPE_CHECKING:
    from unsloth_multigpu.tools.bench.bench_result import Record


Options = BenchOptions


def run(own: Options, given: Mapping[str, Any], program: Sequence[str]) -> int:
    """Runs every arm in every round, and prints the result of the complete rounds.

    Returns:
        0, or 1 if an arm failed.

    Raises:
        ConfigError: An option has an invalid value.
        SetupError: This machine does not have the requested devices.
    """
    names = choose_names(own.arms)
    options = on_device(own)
    options = dataclasses.replace(options, arms=",".join(names))
    with exit_on_signal(), Progress("bench") as progress, made_model(options) as ready:
        runs, failed = run_rounds(ready, progress)
    num_rounds, remarks = len(runs[names[0]]), list[str]()
    if failed is not None:
        progress.say(f"error: {failed}")
        remarks.append(f"stopped: an arm failed in round {num_rounds + 1} of {options.repeats}")
    if num_rounds:
        _publish(dataclasses.replace(options, repeats=num_rounds), remarks, runs)
    return 0 if failed is None else 1


def _publish(options: BenchOptions, remarks: Sequence[str], runs: Mapping[str, list[list[Record]]]) -> None:
    """Prints the table, or all figures as JSON."""
    from unsloth_multigpu.tools.bench.bench_result import summarize
    from unsloth_multigpu.tools.bench.bench_table import conditions, show_results

    results = summarize(runs, options)
    device = next(iter(runs.values()))[0][0]["device"]
    lines = [*conditions(options, device), *remarks]
    screen = Screen()
    if not options.json:
        show_results(screen, lines, results)
        return
    outcome = {
        "options": dataclasses.asdict(options),
        "conditions": lines,
        "results": [dataclasses.asdict(result) for result in results],
        "runs": runs,
    }
    screen.json(outcome)


def on_device(options: BenchOptions) -> BenchOptions:
    """Resolves device="auto", and sets whether ranks share a GPU.

    Raises:
        SetupError: This machine does not have the requested devices.
    """
    from unsloth_multigpu.start import visible_accelerators

    kind, count = ("cpu", 0) if options.device == "cpu" else visible_accelerators()
    if options.device == "cpu" or (options.device == "auto" and not count):
        return dataclasses.replace(options, device="cpu", warmup=options.num_warmup)
    if kind != "cuda" or not count:
        raise SetupError(
            f"--device {options.device}: bench measures CUDA devices and CPUs, and this machine has {count} of {kind}.",
            hint="Set --device cpu, or check the driver and the installed torch.",
        )
    if 1 < count < options.ranks:
        raise SetupError(
            f"--ranks {options.ranks}, but {count} GPUs are visible.",
            hint=f"Set --ranks {count}; or CUDA_VISIBLE_DEVICES=0, for ranks that share one GPU.",
        )
    warmup = NUM_WARMUP_ON_DEVICE if options.warmup is None else options.warmup
    is_shared = count == 1 and options.ranks > 1
    return dataclasses.replace(options, device=kind, warmup=warmup, is_card_shared=is_shared)
