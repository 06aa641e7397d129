"""Runs a check in a child process, so that a crash or a hang becomes its result, and its output does not appear."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.options import ENV_CONFIG, ENV_PROBE, MultiGPUConfig, variable
from unsloth_multigpu.wire.child import run_to_end
from unsloth_multigpu.words import how_ended, shown_lines

_LOG_LINES = 15


def run_probe(
    module: str, folder: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs `python -m <module> FILE`, whose main function is `leave_outcome`, and ends all of its processes.

    `folder` is for its outcome and output. It is also its working folder, because libraries write caches there.
    `environment` are additional variables. Returns the outcome; after a failure `error`, and `hint` or `log`.
    """
    file, log = folder / f"{module}.json", folder / f"{module}.log"
    # As variables, because files of options are not found from its working folder.
    options = {variable(n): str(v) for n, v in MultiGPUConfig.resolve({}).plain_values().items() if v is not None}
    own = {**options, ENV_CONFIG: "", ENV_PROBE: str(file), **(environment or {})}
    command, variables = [sys.executable, "-m", module, str(file)], {**os.environ, **own}
    code = run_to_end(command, variables, log, marker=str(file), limit_s=limit_s)
    # A crash after the outcome was written is a failure, too.
    if code == 0 and file.exists():
        outcome: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return outcome
    what = f"no result within {limit_s:g} s" if code is None else how_ended(code)
    lines = shown_lines(log.read_text(encoding="utf-8", errors="replace"))
    # The launcher's line about the rank that failed first, else the last line, which is the exception.
    named = [line for line in lines if re.match(r"unsloth_multigpu: rank \d", line)]
    reason = (named or lines[-1:] or ["it printed nothing"])[0]
    return {"error": f"{what}: {reason}", "log": lines[-_LOG_LINES:]}


def leave_outcome(measure: Callable[[], Mapping[str, Any]]) -> None:
    """The main function of a probe: writes the result of `measure`, or its error, to the file in `sys.argv[1]`."""
    file = Path(sys.argv[1])
    os.chdir(file.parent)
    try:
        outcome = measure()
    except MultiGPUError as error:
        outcome = {"error": str(error.args[0]), "hint": error.hint}
    file.write_text(json.dumps(outcome), encoding="utf-8")
