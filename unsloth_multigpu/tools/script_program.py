"""How a tool runs the user's script: with which ranks, devices and variables, and for how long at most."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_multigpu.accelerator import HIDDEN, only
from unsloth_multigpu.errors import ConfigError, RankTimeoutError, SetupError
from unsloth_multigpu.options import variable
from unsloth_multigpu.tools.first_steps import StepsRequest
from unsloth_multigpu.wire.identity import read_identity
from unsloth_multigpu.wire.process import run_to_end, threads_of_each
from unsloth_multigpu.words import last_lines

DEFAULT_LIMIT_S = 3600.0
_RANK_MODULE = "unsloth_multigpu.cli.script_runner"
# The supervisor gives its ranks 30 seconds to end.
_TERMINATE_LIMIT_S = 40.0
# Of what a run has printed, where it fails.
_NUM_LINES = 40


def command_of(program: Sequence[str]) -> list[str]:
    """What starts a program as `unsloth-multigpu run` does.

    Args:
        program: The script and its arguments, or `-m`, a module and its arguments.
    """
    # An absolute path: the script may change its working directory before it starts the ranks.
    name = program[0] if program[0] == "-m" else os.path.abspath(program[0])
    return [sys.executable, "-m", _RANK_MODULE, name, *program[1:]]


def run_first_steps(
    name: str,
    program: Sequence[str],
    request: StepsRequest,
    device: str,
    variables: Mapping[str, str],
    limit_s: float,
) -> tuple[int, list[dict[str, Any]], str]:
    """Runs the first steps of a program, with the class of `<name>_recorder` that follows them.

    Args:
        name: Of the command.
        program: See `command_of`.
        request: What it is asked. Its folder is made here; it is private, since the processes are found by its path.
        device: "cpu" shows the run no accelerator.
        variables: Options of a run, and others, for this run.
        limit_s: After which it is ended.

    Returns:
        Its exit code as a shell shows it; what each rank has recorded, rank 0 first; the end of what it has printed.

    Raises:
        RankTimeoutError: It took longer than `limit_s`.
        SetupError: It has ended well and recorded nothing.
    """
    folder = Path(request.folder)
    folder.mkdir()
    environment = {
        # The logs of a training are not overwritten, unless the user names a folder.
        variable("log_dir"): str(folder / "logs"),
        # The order of a set of strings may decide the order of samples.
        "PYTHONHASHSEED": "0",
        **os.environ,
        variable("max_restarts"): "0",
        "WANDB_MODE": "disabled",
        **variables,
        **device_variables(device, request.num_gpus),
        **request.variables(f"unsloth_multigpu.tools.{name}.{name}_recorder:{name.title()}"),
    }
    log = folder / "output.log"
    with log.open("wb") as output:
        code = run_to_end(
            command_of(program),
            environment,
            output,
            # The request has the folder in it, as JSON, which writes only ASCII as it is.
            marker=f"{folder.parent.name}/{folder.name}",
            limit_s=limit_s,
            terminate_limit_s=_TERMINATE_LIMIT_S,
        )
    tail = last_lines(log.read_text(encoding="utf-8", errors="replace"), _NUM_LINES)
    if code is None:
        raise RankTimeoutError(
            f"The run did not reach its end within timeout_s={limit_s:g} seconds. The end of its output:\n{tail}",
            hint="Ask for fewer --steps, or raise --timeout-s where it only takes long.",
        )
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank_*.json")]
    if code == 0 and not records:
        raise SetupError(
            f"{' '.join(program)} ended without a training that {name} could follow. The end of its output:\n{tail}",
            hint="It must call train() of a transformers Trainer; enable_multi_gpu(), if it is there, comes before.",
        )
    return 128 - code if code < 0 else code, sorted(records, key=lambda record: int(record["rank"])), tail


def check_is_no_rank(name: str) -> None:
    """Raises SetupError in a rank: the command starts its ranks itself."""
    if read_identity(os.environ) is not None:
        raise SetupError(f"{name} starts its ranks itself, but is a rank here.", hint="Run it without a launcher.")


def device_variables(device: str, num_gpus: int) -> dict[str, str]:
    """The variables that show a run its devices: none, or one to one process, which would use DataParallel for more."""
    from unsloth_multigpu.start import visible_accelerators

    if device == "cpu":
        # Set here and not by the run: a library may count the cards before the script asks for the CPU.
        return {**HIDDEN, "ACCELERATE_USE_CPU": "true"}
    kind, num_devices = visible_accelerators()
    if num_gpus > 1 or num_devices < 2:
        return {}
    return only(kind, 0, os.environ)


def thread_variables(device: str, num_ranks: int) -> dict[str, str]:
    """On the CPU, one process is given the threads of a rank that it is compared with, unless the user has set them."""
    from unsloth_multigpu.start import visible_accelerators

    if device != "cpu" and visible_accelerators()[1] > 0:
        return {}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_of_each(num_ranks))}


def parse_numbers(name: str, text: str) -> list[int]:
    """ "1,2,8" as numbers of GPUs, smallest first.

    Raises:
        ConfigError: It is something else.
    """
    if not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text):
        raise ConfigError(
            f"{name}={text!r}; expected numbers of GPUs such as 1,2,4,8.", hint="Put commas between them."
        )
    return sorted({int(number) for number in text.split(",")})
