"""`unsloth-multigpu verify`: does a script train the same on one process and on several ranks?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import ConfigError, DivergenceError, SetupError
from unsloth_multigpu.options import MultiGPUConfig, command_options, variable
from unsloth_multigpu.row import CommandOption
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.tools.program import (
    DEFAULT_LIMIT_S,
    check_is_no_rank,
    check_ranks,
    common_variables,
    device_variables,
    thread_variables,
)
from unsloth_multigpu.tools.verify.output import RunOutput
from unsloth_multigpu.tools.verify.page import COMPARED, show
from unsloth_multigpu.tools.verify.run import ScriptFailed, ScriptRun, tell_output
from unsloth_multigpu.tools.verify.speed import Speed, speed_of, times_as_fast
from unsloth_multigpu.tools.verify.tool import ReceiptRequest
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.process import exit_on_signal

if TYPE_CHECKING:
    from unsloth_multigpu.tools.verify.comparison import Comparison, RunRecord

SCHEMA_VERSION = 1
DEFAULT_STEPS = 5
DEFAULT_FILE = "receipt.json"
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
# Options that a run does not have, or that mean something else here: see cli.command.
OWN_OPTIONS: dict[str, CommandOption] = {
    "num_gpus": CommandOption(
        int, "Ranks that are compared with one process. [all visible GPUs; 2 CPU ranks without one]", "N"
    ),
    "steps": CommandOption(int, f"Optimizer steps that are compared. [{DEFAULT_STEPS}]", "N"),
    "no_dropout": CommandOption(bool, "Set every dropout probability to 0 in both runs. [as in the script]"),
    "json": CommandOption(
        str, f"File of the receipt; what the script prints goes to a .log beside it. [{DEFAULT_FILE}]", "FILE"
    ),
    "timeout_s": CommandOption(float, f"Limit of each of the two runs, in seconds. [{DEFAULT_LIMIT_S:g}]", "SECONDS"),
}


def run_verify(options: argparse.Namespace, program: Sequence[str]) -> int:
    """Runs the first steps of `program` twice, prints the comparison and writes the receipt.

    Args:
        options: What the command line gave; None = not given.
        program: The script and its arguments, or `-m`, a module and its arguments.

    Returns:
        0 where both runs agree, the exit code of `DivergenceError` where they do not, that of the script if it failed.

    Raises:
        ConfigError: A number of steps or ranks that cannot be compared, a file that is no receipt, or options that the
            script's own arguments contradict.
        SetupError: More ranks than GPUs, or the script trained nothing that could be followed.
        RankTimeoutError: A run took longer than `options.timeout_s`.
    """
    num_steps = DEFAULT_STEPS if options.steps is None else options.steps
    limit_s = DEFAULT_LIMIT_S if options.timeout_s is None else options.timeout_s
    if num_steps < 1:
        raise ConfigError(f"--steps {num_steps}; expected at least 1.", hint=f"Leave it out for {DEFAULT_STEPS}.")
    file = Path(options.json or DEFAULT_FILE)
    _check_place(file)
    given = {name: getattr(options, name) for name in command_options("verify")}
    # The same rules as for the options of a run.
    config = MultiGPUConfig.resolve({**given, "num_gpus": options.num_gpus, "timeout_s": limit_s})
    num_ranks = _num_ranks(config)
    variables = {variable(name): str(value) for name, value in given.items() if value is not None}
    output = RunOutput(file)
    threads = thread_variables(config.device, num_ranks)
    records = []
    with private_dir() as folder, exit_on_signal(), Progress("verify") as progress:
        for name, num_gpus in (("one", 1), ("many", num_ranks)):
            place = folder / name
            place.mkdir()
            request = ReceiptRequest(str(place), num_steps, num_gpus, dropout=not options.no_dropout)
            environment = {
                **common_variables(folder / "logs"),
                **variables,
                **threads,
                **device_variables(config.device, num_gpus),
                **request.variables(),
            }
            label = "one process" if num_gpus == 1 else f"{num_gpus} ranks"
            # The request has the place in it, as JSON, which writes only ASCII as it is.
            run = ScriptRun(label, program, environment, place, f"{folder.name}/{name}", num_steps, limit_s)
            try:
                run.run(output, progress)
                records.append(_read(place, program))
            except ScriptFailed as failed:
                return failed.code
            except SetupError:
                tell_output(output, progress, "")
                raise
            _check_followed(config, given, records[-1])
        one, many = records
        comparison = _compare(folder, one, many)
    speeds = (_speed(one), _speed(many)) if one.ranks and many.ranks else None
    receipt = _receipt(program, one, many, comparison, speeds)
    file.write_text(json_text(receipt), encoding="utf-8")
    screen = Screen()
    num_threads = threads.get("OMP_NUM_THREADS")
    show(screen, comparison, receipt["sources"], many.facts, num_ranks, speeds, num_threads)
    screen.line(f"receipt: {file}, output of both runs: {output.path}")
    return 0 if comparison.agree else DivergenceError.exit_code


def _num_ranks(config: MultiGPUConfig) -> int:
    from unsloth_multigpu.start import visible_accelerators
    from unsloth_multigpu.tools.allreduce import DEFAULT_CPU_RANKS

    check_is_no_rank("verify")
    num_devices = 0 if config.device == "cpu" else visible_accelerators()[1]
    num_ranks = config.num_gpus or num_devices or DEFAULT_CPU_RANKS
    if num_ranks == 1:
        raise ConfigError(
            "verify compares one process with several ranks; this would be one rank.",
            hint="Give --num-gpus 2, with --device cpu where there is one GPU.",
        )
    check_ranks("verify", replace(config, num_gpus=num_ranks))
    return num_ranks


def _check_place(file: Path) -> None:
    if not file.parent.is_dir():
        raise ConfigError(f"--json {file}: there is no folder {str(file.parent)!r}.", hint="Make it, or name another.")
    if file.exists() and not _is_receipt(file):
        raise ConfigError(
            f"--json {file}: what is there is no receipt, and would be lost.",
            hint="Name another file. Where --json is the script's own option, put `--` before the script.",
        )


def _is_receipt(file: Path) -> bool:
    """True for an empty file, too."""
    try:
        text = file.read_text(encoding="utf-8")
        return not text or {"schema_version", "reasons"} <= dict(json.loads(text)).keys()
    except (OSError, ValueError, TypeError):  # A folder, no text, no JSON, no object.
        return False


def _read(folder: Path, program: Sequence[str]) -> RunRecord:
    from unsloth_multigpu.tools.verify.comparison import read_run

    record = read_run(folder)
    if record is None:
        raise SetupError(
            f"{' '.join(program)} ended without a training that verify could follow.",
            hint="It must call train() of a transformers Trainer; enable_multi_gpu(), if it is there, comes before.",
        )
    if not record.steps:
        raise SetupError("The training ended before its first optimizer step.", hint="Check max_steps and the data.")
    return record


def _check_followed(asked: MultiGPUConfig, given: Mapping[str, Any], record: RunRecord) -> None:
    """Arguments of the line win over options of the command, which travel as variables."""
    values, followed = asked.plain_values(), record.facts["config"]
    for name, value in given.items():
        if value is not None and followed[name] != values[name]:
            raise ConfigError(
                f"verify was asked for {name}={values[name]!r}, but the script's enable_multi_gpu() says "
                f"{followed[name]!r}.",
                hint="Leave it out of one of them.",
            )


def _compare(folder: Path, one: RunRecord, many: RunRecord) -> Comparison:
    from unsloth_multigpu.tools.verify.comparison import bounds_for, compare, compare_updates
    from unsloth_multigpu.tools.verify.recorder import UPDATES_FILE

    precision = max((one.facts["precision"], many.facts["precision"]), key=_PRECISIONS.index)
    bounds = bounds_for(precision, many.facts["optimizer"])
    files = [folder / name / UPDATES_FILE for name in ("one", "many")]
    weights = compare_updates(files[0], files[1], one.gradient_shares, bounds.noise)
    return compare(one, many, weights, bounds)


def _receipt(
    program: Sequence[str],
    one: RunRecord,
    many: RunRecord,
    comparison: Comparison,
    speeds: tuple[Speed, Speed] | None,
) -> dict[str, Any]:
    sources = {source["name"]: source for run in (one, many) for source in run.facts["sources"]}
    facts = [{k: v for k, v in run.facts.items() if k not in ("sources", "versions")} for run in (one, many)]
    return {
        "schema_version": SCHEMA_VERSION,
        "command": list(program),
        "compared": COMPARED,
        "agree": comparison.agree,
        "reasons": list(comparison.reasons),
        "sources": list(sources.values()),
        "bounds": asdict(comparison.bounds),
        "versions": many.facts["versions"],
        "runs": {"one": facts[0], "many": facts[1]},
        "figures": None if speeds is None else _figures(one, many, *speeds),
        "steps": [asdict(step) for step in comparison.steps],
        "weights": [asdict(weight) for weight in comparison.weights],
    }


def _speed(run: RunRecord) -> Speed:
    return speed_of(run.ranks, [step.samples.total() for step in run.steps])


def _figures(one: RunRecord, many: RunRecord, *speeds: Speed) -> dict[str, Any]:
    """What both runs took: in one row each, and of each rank."""
    runs = {"one": (one, speeds[0]), "many": (many, speeds[1])}
    found = {name: {**asdict(speed), "ranks": [asdict(r) for r in run.ranks]} for name, (run, speed) in runs.items()}
    return {"times_as_fast": times_as_fast(*speeds), **found}
