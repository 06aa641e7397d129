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
from unsloth_multigpu.tools.verify.page import COMPARED, show
from unsloth_multigpu.tools.verify.run import ScriptFailed, ScriptRuns
from unsloth_multigpu.tools.verify.tool import ReceiptRequest
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.process import exit_on_signal

if TYPE_CHECKING:
    from unsloth_multigpu.tools.verify.comparison import Agreement, RunRecord

SCHEMA_VERSION = 2
DEFAULT_STEPS = 5
DEFAULT_FILE = "receipt.json"
# Options that a run does not have, or that mean something else here: see cli.command.
OWN_OPTIONS: dict[str, CommandOption] = {
    "num_gpus": CommandOption(
        int, "Ranks that are compared with one process. [all visible GPUs; 2 CPU ranks without one]", "N"
    ),
    "steps": CommandOption(int, f"Optimizer steps that are compared. [{DEFAULT_STEPS}]", "N"),
    "no_dropout": CommandOption(bool, "Switch dropout off in both runs. [as in the script]"),
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
    threads = thread_variables(config.device, num_ranks)
    records = []
    with private_dir() as folder, exit_on_signal(), Progress("verify") as progress:
        runs = ScriptRuns(program, file, limit_s, progress)
        for name, num_gpus in (("one", 1), ("many", num_ranks)):
            place = folder / name
            place.mkdir()
            environment = {
                **common_variables(folder / "logs"),
                **variables,
                **threads,
                **device_variables(config.device, num_gpus),
                **ReceiptRequest(str(place), num_steps, num_gpus, dropout=not options.no_dropout).variables(),
            }
            label = f"{num_steps} steps on {'one process' if num_gpus == 1 else f'{num_gpus} ranks'}"
            try:
                # The request has the place in it, as JSON, which writes only ASCII as it is.
                runs.run(label, environment, f"{folder.name}/{name}")
                records.append(_read(place, program))
            except ScriptFailed as failed:
                return failed.code
            except SetupError:
                runs.tell("")
                raise
            _check_followed(config, given, records[-1])
    from unsloth_multigpu.tools.verify.comparison import compare  # Imports torch.

    one, many = records
    found = compare(one, many)
    receipt = _receipt(program, one, many, found)
    file.write_text(json_text(receipt), encoding="utf-8")
    screen = Screen()
    show(screen, found, receipt["sources"], many.facts, num_ranks, threads.get("OMP_NUM_THREADS"))
    screen.line(f"receipt: {file}, output of both runs: {runs.path}")
    return 0 if found.agree else DivergenceError.exit_code


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


def _receipt(program: Sequence[str], one: RunRecord, many: RunRecord, found: Agreement) -> dict[str, Any]:
    facts = [{name: value for name, value in run.facts.items() if name != "versions"} for run in (one, many)]
    one_s, ranks_s = found.times or (None, None)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": list(program),
        "compared": COMPARED,
        "agree": found.agree,
        "reasons": list(found.reasons),
        "sources": list({source["name"]: source for run in (one, many) for source in run.sources}.values()),
        "bounds": asdict(found.bounds),
        "versions": many.facts["versions"],
        "runs": {"one": facts[0], "many": facts[1]},
        "one_process_s": one_s,
        "ranks_s": ranks_s,
        "steps": [asdict(step) for step in found.steps],
        "weights": [asdict(weight) for weight in found.weights],
    }
