"""`unsloth-multigpu verify`: does a script train the same on one process and on several ranks?"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from unsloth_multigpu.cli.screen import Progress, Screen
from unsloth_multigpu.errors import ConfigError, DivergenceError, MultiGPUError, SetupError
from unsloth_multigpu.option_type import CommandOption
from unsloth_multigpu.options import MultiGPUConfig, command_options, variable
from unsloth_multigpu.tools.first_steps import StepsRequest
from unsloth_multigpu.tools.plain_json import json_text
from unsloth_multigpu.tools.script_program import (
    DEFAULT_LIMIT_S,
    check_is_no_rank,
    check_ranks,
    common_variables,
    device_variables,
    run_program,
    thread_variables,
)
from unsloth_multigpu.tools.tail import last_lines
from unsloth_multigpu.wire.folder import private_dir
from unsloth_multigpu.wire.process import exit_on_signal

SCHEMA_VERSION = 2
DEFAULT_STEPS = 5
DEFAULT_FILE = "receipt.json"
_TOOL = "unsloth_multigpu.tools.verify.verify_tool:Verify"
# The begin of the script's output, by which the next call knows that it may replace the file.
HEADING = "unsloth-multigpu verify: what the script printed"
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
        ConfigError: A number of steps or ranks that cannot be compared, or a file that is no receipt.
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
        output = _Output(file, progress)
        for name, num_gpus in (("one", 1), ("many", num_ranks)):
            place = folder / name
            place.mkdir()
            environment = {
                **common_variables(folder / "logs"),
                **variables,
                **threads,
                **device_variables(config.device, num_gpus),
                **StepsRequest(str(place), num_steps, num_gpus, dropout=not options.no_dropout).variables(_TOOL),
            }
            label = f"{num_steps} steps on {'one process' if num_gpus == 1 else f'{num_gpus} ranks'}"
            with output.of(label) as stream:
                # The request has the place in it, as JSON, which writes only ASCII as it is.
                code = run_program(program, environment, stream, f"{folder.name}/{name}", limit_s)
                if code == 0:
                    records.append(_read(place, program))
            if code != 0:
                output.tell(f"{label} ended with exit code {code}. ")
                return code
    receipt = _receipt(program, *records)
    file.write_text(json_text(receipt), encoding="utf-8")
    from unsloth_multigpu.tools.verify.page import show  # Imports torch.

    screen = Screen()
    show(screen, receipt, threads.get("OMP_NUM_THREADS"))
    screen.line(f"receipt: {file}, output of both runs: {output.path}")
    return 0 if receipt["agree"] else DivergenceError.exit_code


class _Output:
    """What the script prints in both runs: a file beside the receipt.

    Args:
        receipt: Its file.
        progress: Where it is said how far the runs are.
    """

    def __init__(self, receipt: Path, progress: Progress) -> None:
        self.path = receipt.with_suffix(".log" if receipt.suffix != ".log" else ".output.log")
        self._progress = progress
        self._begin = 0
        try:
            if self.path.exists() and self.path.read_bytes()[: len(HEADING)] not in (HEADING.encode(), b""):
                raise ConfigError(
                    f"--json {receipt}: {self.path}, where the output of both runs goes, is another file, and would be "
                    "lost.",
                    hint="Name another receipt.",
                )
            self.path.write_text(f"{HEADING}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {receipt}: {error}", hint="Name a folder that can be written.") from None

    @contextmanager
    def of(self, label: str) -> Iterator[BinaryIO]:
        """Takes the output of a run. After an error of ours its end is shown.

        Args:
            label: The run's name for people: "5 steps on one process".
        """
        begin_s = time.monotonic()
        self._progress.say(f"{label}, output in {self.path}")
        self._progress.show(label, 0, 1)
        try:
            with self.path.open("ab") as stream:
                stream.write(f"\n===== {label} =====\n".encode())
                stream.flush()
                self._begin = os.path.getsize(self.path)
                yield stream
        except MultiGPUError:
            self.tell("")
            raise
        self._progress.clear()
        self._progress.say(f"{label} took {time.monotonic() - begin_s:.1f} s with start-up")

    def tell(self, what: str) -> None:
        """Shows the end of what the last run has printed, and where all of it is, behind the sentence `what`."""
        self._progress.clear()
        if tail := last_lines(self.path.read_bytes()[self._begin :].decode("utf-8", errors="replace"), 40):
            print(tail, file=sys.stderr)
        self._progress.say(f"{what}All of its output: {self.path}")


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


def _read(folder: Path, program: Sequence[str]) -> dict[str, Any]:
    from unsloth_multigpu.tools.verify.run_comparison import read_run

    record = read_run(folder)
    if record is None:
        raise SetupError(
            f"{' '.join(program)} ended without a training that verify could follow.",
            hint="It must call train() of a transformers Trainer; enable_multi_gpu(), if it is there, comes before.",
        )
    if not record["steps"]:
        raise SetupError("The training ended before its first optimizer step.", hint="Check max_steps and the data.")
    return record


def _receipt(program: Sequence[str], one: Mapping[str, Any], many: Mapping[str, Any]) -> dict[str, Any]:
    from unsloth_multigpu.tools.verify.run_comparison import compare, is_compared

    facts = [{name: value for name, value in run["facts"].items() if name != "versions"} for run in (one, many)]
    found = compare(one, many)
    compared = [step["compared"] for step in found["steps"] if is_compared(step)]
    times = [(each["one_process_s"], each["dealt_s"]) for each in compared if each["one_process_s"] and each["dealt_s"]]
    one_s, ranks_s = (statistics.median(column) for column in zip(*times, strict=True)) if times else (None, None)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": list(program),
        "compared": "Compared: the beginning of the script's first train(). What comes after it was not run.",
        "sources": list({source["name"]: source for run in (one, many) for source in run["sources"]}.values()),
        "versions": many["facts"]["versions"],
        "runs": {"one": facts[0], "many": facts[1]},
        # Median seconds of a step's forward and backward passes.
        "one_process_s": one_s,
        "ranks_s": ranks_s,
        **found,
    }
