"""Runs a check in a child process: a crash, a hang or output there becomes one result here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.options import ENV_CONFIG, ENV_PROBE
from unsloth_multigpu.wire.child import end_command, start_process
from unsloth_multigpu.words import how_ended, shown_lines

_TERMINATE_LIMIT_S = 10.0
_LOG_LINES = 15


class Probe:
    """Runs `python -m <module> FILE`, which writes its outcome as JSON to FILE.

    The main function of the module is `leave_outcome`. `folder` has its outcome and output, and is its working folder,
    because libraries write caches. `environment` are additional variables.
    """

    def __init__(self, module: str, folder: Path, limit_s: float, environment: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._outcome = folder / f"{module}.json"
        self._log = folder / f"{module}.log"
        self._limit_s = limit_s
        # As an absolute path, because it has another working folder.
        file = os.environ.get(ENV_CONFIG, "").strip()
        told = {ENV_PROBE: str(self._outcome), **({ENV_CONFIG: os.path.abspath(file)} if file else {})}
        self._environment = {**os.environ, **(environment or {}), **told}

    def __enter__(self) -> Probe:
        self._deadline = time.monotonic() + self._limit_s
        command = [sys.executable, "-m", self._module, str(self._outcome)]
        # Ctrl-C reaches only this process, which then ends the probe and its children.
        self._process = start_process(command, self._environment, self._log)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def outcome(self) -> dict[str, Any]:
        """Waits for the end and returns the outcome; after a failure `error`, `log` and perhaps `hint`."""
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._end()
            return self._failure(f"no result within {self._limit_s:g} s")
        # A crash after the outcome was written is a failure, too.
        if self._process.returncode != 0 or not self._outcome.exists():
            return self._failure(how_ended(self._process.returncode))
        outcome: dict[str, Any] = json.loads(self._outcome.read_text(encoding="utf-8"))
        return outcome

    def _failure(self, what: str) -> dict[str, Any]:
        lines = shown_lines(self._log.read_text(encoding="utf-8", errors="replace"))
        # The launcher's line about the rank that failed first, else the last line, which is the exception.
        named = [line for line in lines if re.match(r"unsloth_multigpu: rank \d", line)]
        reason = (named or lines[-1:] or ["it printed nothing"])[0]
        return {"error": f"{what}: {reason}", "log": lines[-_LOG_LINES:]}

    def _end(self) -> None:
        # The launcher ends its ranks after SIGTERM, and they die with it.
        end_command(self._process, str(self._outcome), _TERMINATE_LIMIT_S)


def leave_outcome(measure: Callable[[], Mapping[str, Any]]) -> None:
    """The main function of a probe: writes the result of `measure`, or its error, to the file in `sys.argv[1]`."""
    file = Path(sys.argv[1])
    os.chdir(file.parent)
    try:
        outcome = measure()
    except MultiGPUError as error:
        outcome = {"error": str(error.args[0]), "hint": error.hint}
    # Renamed when complete, so that a killed process leaves no partial file.
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(outcome), encoding="utf-8")
    partial.replace(file)
