"""Runs the user's script for a tool: ranks, devices, variables, time limit."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.accelerator import HIDDEN, variables_for
from unsloth_multigpu.errors import ConfigError, RankTimeoutError, SetupError
from unsloth_multigpu.options import variable
from unsloth_multigpu.wire.child import run_to_end
from unsloth_multigpu.wire.context import ToolRequest
from unsloth_multigpu.wire.identity import read_identity
from unsloth_multigpu.wire.process import threads_of_each
from unsloth_multigpu.wire.run import SCRIPT_MODULE
from unsloth_multigpu.words import last_lines

DEFAULT_LIMIT_S = 3600.0
# The supervisor and torchrun give their ranks 30 seconds to end.
_TERMINATE_LIMIT_S = 40.0
# Lines of the output that are shown after a failure.
_NUM_LINES = 40


def command_of(program: Sequence[str]) -> list[str]:
    """Returns the command that starts a program, as `unsloth-multigpu run` does.

    `program` is the script and its arguments, or `-m`, a module and its arguments.
    """
    # An absolute path, because the script may change its working folder before it starts the ranks.
    name = program[0] if program[0] == "-m" else os.path.abspath(program[0])
    return [sys.executable, "-m", SCRIPT_MODULE, name, *program[1:]]


def run_recorded(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, *, limit_s: float, cwd: Path | None = None
) -> tuple[int | None, list[dict[str, Any]], str]:
    """Runs a command whose processes write `rank_N.json` to `folder`, and ends all of its processes.

    The processes are identified by the folder's path, which must occur in `environment` only.

    Returns the exit code, None = it took longer than `limit_s`; if it is 0 the records, rank 0 first; the end of the
    output.
    """
    log = folder / "output.log"
    code = run_to_end(
        command, environment, log, marker=str(folder), limit_s=limit_s, terminate_limit_s=_TERMINATE_LIMIT_S, cwd=cwd
    )
    paths = folder.glob("rank_*.json") if code == 0 else ()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    tail = last_lines(log.read_text(encoding="utf-8", errors="replace"), _NUM_LINES)
    return code, sorted(records, key=lambda record: int(record["rank"])), tail


def run_first_steps(
    name: str,
    program: Sequence[str],
    values: Mapping[str, Any],
    device: str,
    variables: Mapping[str, str],
    limit_s: float,
) -> tuple[int, list[dict[str, Any]], str]:
    """Runs the first steps of a program with the recorder of the command `name`, see `plugin.tool_of`.

    `values` are the arguments of `recorders.first_steps.FirstSteps`, whose folder is created. device="cpu" hides
    accelerators from the run; `variables` are the options of the run, and others. Returns the exit code as in a shell;
    the record of each rank, rank 0 first; the end of the output.

    Raises:
        RankTimeoutError: It took longer than `limit_s`.
        SetupError: It exited with 0 and recorded nothing.
    """
    folder = Path(values["folder"])
    folder.mkdir()
    environment = {
        # Not the folder of the user's trainings, unless the user has set it.
        variable("log_dir"): str(folder / "logs"),
        # The iteration order of a set of strings may decide the order of samples.
        "PYTHONHASHSEED": "0",
        **os.environ,
        variable("max_restarts"): "0",
        "WANDB_MODE": "disabled",
        **variables,
        **device_variables(device, values["num_gpus"]),
        **ToolRequest(name, values).variables(),
    }
    code, records, tail = run_recorded(command_of(program), environment, folder, limit_s=limit_s)
    if code is None:
        raise RankTimeoutError(
            f"The run did not reach its end within timeout_s={limit_s:g} seconds. The end of its output:\n{tail}",
            hint="Set fewer --steps, or a higher --timeout-s.",
        )
    if code == 0 and not records:
        raise SetupError(
            f"{' '.join(program)} ended without a training that {name} could record. The end of its output:\n{tail}",
            hint="It must call train() of a transformers Trainer, after enable_multi_gpu() if it has that call.",
        )
    return 128 - code if code < 0 else code, records, tail


def check_is_no_rank(name: str) -> None:
    """Raises SetupError in a rank, because the command starts ranks itself."""
    if read_identity(os.environ) is not None:
        raise SetupError(f"{name} starts its ranks itself, but is a rank here.", hint="Run it without a launcher.")


def device_variables(device: str, num_gpus: int) -> dict[str, str]:
    """Returns variables that hide all devices, or all but one if a single process would use DataParallel."""
    from unsloth_multigpu.start import visible_accelerators

    if device == "cpu":
        # Set for the whole process: a library may count the GPUs before the script selects the CPU.
        return {**HIDDEN, "ACCELERATE_USE_CPU": "true"}
    kind, num_devices = visible_accelerators()
    if num_gpus > 1 or num_devices < 2:
        return {}
    return variables_for(kind, [0], os.environ)


def thread_variables(device: str, num_ranks: int) -> dict[str, str]:
    """Returns the variable that gives one CPU process as many threads as a rank, unless the user has set it."""
    from unsloth_multigpu.start import visible_accelerators

    if device != "cpu" and visible_accelerators()[1] > 0:
        return {}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_of_each(num_ranks))}


def parse_numbers(name: str, text: str) -> list[int]:
    """Parses numbers of GPUs such as "1,2,8", or raises ConfigError. Returns them in ascending order."""
    if not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text):
        raise ConfigError(
            f"{name}={text!r}; expected numbers of GPUs such as 1,2,4,8.", hint="Put commas between them."
        )
    return sorted({int(number) for number in text.split(",")})
