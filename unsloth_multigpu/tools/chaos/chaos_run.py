"""Runs the user's script once for `unsloth-multigpu chaos`, and counts the processes that it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unsloth_multigpu.cli.script_runner import calls_enable
from unsloth_multigpu.options import variable
from unsloth_multigpu.tools.chaos.fault import ChaosRequest, Fault
from unsloth_multigpu.wire.process import find_marked, kill_marked, wait_after_kill

_POLL_S = 0.05
# Processes that outlive the command by more than this count as orphans.
_ORPHAN_LIMIT_S = 5.0
# The launcher's message about the end of a run. Other log lines have the same prefix.
_TOLD = re.compile(r"unsloth_multigpu: (.*(?:The other ranks were stopped|Starting all ranks again|stopped by|SIG).*)")


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Args:
        code: Exit code, -N = ended by signal N, None = it exceeded the time limit.
        start_s: Time of the start, on the clock of `time.monotonic`.
        end_s: Time when its last process was gone.
        num_orphans: Processes that it left behind.
        told: The launcher's last message about the end or restart.
        output: Its whole output.
    """

    code: int | None
    start_s: float
    end_s: float
    num_orphans: int
    told: str
    output: str


@dataclass(frozen=True)
class Scene:
    """The runs of one row of the table.

    Args:
        folder: Folder of this row, for records and the script's files.
        program: The script and its arguments, or `-m`, a module and its arguments.
        environment: Variables of every run.
        limit_s: Time limit of a run.
    """

    folder: Path
    program: Sequence[str]
    environment: Mapping[str, str]
    limit_s: float

    @property
    def records(self) -> Path:
        """Folder of the ranks' records. Only the variables of this row's processes contain its path."""
        return self.folder / "records"

    @property
    def work(self) -> Path:
        """Folder for the script's checkpoints and logs, which replaces `{run}` in its arguments."""
        return self.folder / "work"

    def run(self, faults: Sequence[Fault], options: Mapping[str, object]) -> Ended:
        """Runs the script to its end.

        Args:
            faults: The faults to inject.
            options: Options of `enable_multi_gpu` for this run.
        """
        for place in (self.records, self.work):
            place.mkdir(parents=True, exist_ok=True)
        variables = {variable(name): str(value) for name, value in options.items() if value is not None}
        request = ChaosRequest(str(self.records), faults, str(self.work))
        marker, start_s = str(self.records), time.monotonic()
        process = subprocess.Popen(
            self._command(),
            env={**self.environment, **variables, **request.variables()},
            stdin=subprocess.DEVNULL,
            # A pipe, because a limit on the size of files, which simulates a full disk, must not affect the output.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        printed: list[bytes] = []
        reader = threading.Thread(target=lambda: printed.extend(process.stdout or ()), daemon=True)
        reader.start()
        code: int | None = None
        num_orphans = 0
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(self.limit_s)
            end_s = time.monotonic() + _ORPHAN_LIMIT_S
            while code is not None and (num_orphans := len(find_marked(marker))) and time.monotonic() < end_s:
                time.sleep(_POLL_S)
        finally:
            end_s = time.monotonic()
            kill_marked(marker)
            wait_after_kill(process)
        reader.join(_ORPHAN_LIMIT_S)
        output = b"".join(printed).decode("ascii", errors="replace").replace("\r", "\n")
        # Show redirected paths as those in the user's folder.
        for redirected in (f"{self.work}/output{Path().resolve()}", str(self.work)):
            output = output.replace(redirected, ".")
        told = [m[1] for m in map(_TOLD.match, output.splitlines()) if m]
        return Ended(code, start_s, end_s, num_orphans, told[-1] if told else "", output)

    def _command(self) -> list[str]:
        program = [argument.replace("{run}", str(self.work)) for argument in self.program]
        if program[0] != "-m":
            program[0] = os.path.abspath(program[0])
        own = [] if calls_enable(program) else ["-m", "unsloth_multigpu.cli.main", "run", "--"]
        return [sys.executable, *own, *program]
