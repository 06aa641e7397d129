"""Runs the user's script for `unsloth-multigpu verify`. What it prints goes to a file beside the receipt."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from unsloth_multigpu.cli.screen import Progress
from unsloth_multigpu.errors import ConfigError, MultiGPUError
from unsloth_multigpu.tools.program import run_program
from unsloth_multigpu.tools.tail import last_lines

# The begin of the file, by which the next call knows that it may replace it.
HEADING = "unsloth-multigpu verify: what the script printed"


class ScriptFailed(Exception):
    """The script ended with an exit code above 0; everything about it has been said.

    Args:
        code: As a shell shows it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class ScriptRuns:
    """Runs of one script, whose output is in one file: that of `receipt.json` is `receipt.log`.

    Args:
        program: The script and its arguments, or `-m`, a module and its arguments.
        receipt: File of the receipt.
        limit_s: After which a run is ended.
        progress: Where it is said how far they are.

    Raises:
        ConfigError: Another file has the name of the output, or it cannot be written.
    """

    def __init__(self, program: Sequence[str], receipt: Path, limit_s: float, progress: Progress) -> None:
        self.path = receipt.with_suffix(".log" if receipt.suffix != ".log" else ".output.log")
        self._program = program
        self._limit_s = limit_s
        self._progress = progress
        try:
            if self.path.exists() and not self._is_mine():
                raise ConfigError(
                    f"--json {receipt}: {self.path}, where the output of both runs goes, is another file, and would be "
                    "lost.",
                    hint="Name another receipt.",
                )
            self.path.write_text(f"{HEADING}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {receipt}: {error}", hint="Name a folder that can be written.") from None
        self._begin = 0

    def _is_mine(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(len(HEADING)) in (HEADING.encode(), b"")

    def run(self, label: str, environment: Mapping[str, str], marker: str) -> None:
        """Runs it to its end. Where that is a bad one, the end of its output is shown.

        Args:
            label: The run's name for people: "5 steps on one process".
            environment: All of its variables. One of them must hold `marker`.
            marker: By which its processes are found, ASCII.

        Raises:
            ScriptFailed: It ended with an exit code above 0.
            RankTimeoutError: It took longer than the limit.
        """
        begin_s = time.monotonic()
        self._progress.say(f"{label}, output in {self.path}")
        self._progress.show(label, 0, 1)
        try:
            with self.path.open("ab") as stream:
                stream.write(f"\n===== {label} =====\n".encode())
                stream.flush()
                self._begin = os.path.getsize(self.path)
                code = run_program(self._program, environment, stream, marker, self._limit_s)
        except MultiGPUError:
            self.tell("")
            raise
        self._progress.clear()
        if code != 0:
            self.tell(f"{label} ended with exit code {code}. ")
            raise ScriptFailed(code)
        self._progress.say(f"{label} took {time.monotonic() - begin_s:.1f} s with start-up")

    def tell(self, what: str) -> None:
        """Shows the end of what the last run has printed, and where all of it is.

        Args:
            what: A sentence in front of that.
        """
        self._progress.clear()
        if tail := self.tail():
            print(tail, file=sys.stderr)
        self._progress.say(f"{what}All of its output: {self.path}")

    def tail(self, num_lines: int = 40) -> str:
        """The end of what the last run has printed."""
        with self.path.open("rb") as file:
            file.seek(self._begin)
            return last_lines(file.read().decode("utf-8", errors="replace"), num_lines)
