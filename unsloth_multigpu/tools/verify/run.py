"""One run of the user's script for `unsloth-multigpu verify`: its output goes to a file, its steps to the screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from unsloth_multigpu.cli.screen import Progress
from unsloth_multigpu.errors import MultiGPUError
from unsloth_multigpu.tools.program import run_program
from unsloth_multigpu.tools.verify.output import RunOutput
from unsloth_multigpu.tools.verify.tool import steps_done


class ScriptFailed(Exception):
    """The script ended with an exit code above 0; everything about it has been said.

    Args:
        code: As a shell shows it.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class ScriptRun:
    """What is run.

    Args:
        label: Its name for people: "one process".
        program: The script and its arguments, or `-m`, a module and its arguments.
        environment: All of its variables. One of them must hold `marker`.
        place: Where its ranks leave what they have recorded.
        marker: By which its processes are found, ASCII.
        num_steps: After which it ends.
        limit_s: After which it is ended.
    """

    label: str
    program: Sequence[str]
    environment: Mapping[str, str]
    place: Path
    marker: str
    num_steps: int
    limit_s: float

    def run(self, output: RunOutput, progress: Progress) -> None:
        """Runs it to its end. Where that is a bad one, the end of its output is shown.

        Raises:
            ScriptFailed: It ended with an exit code above 0.
            RankTimeoutError: It took longer than `limit_s`.
        """
        progress.say(f"{self.num_steps} steps on {self.label}, output in {output.path}")
        begin_s = time.monotonic()
        try:
            with output.open_for(self.label) as stream:
                code = self._run(stream, progress)
        except MultiGPUError:
            tell_output(output, progress, "")
            raise
        progress.clear()
        if code != 0:
            tell_output(output, progress, f"the run on {self.label} ended with exit code {code}. ")
            raise ScriptFailed(code)
        done = steps_done(self.place)
        progress.say(f"{done} steps on {self.label} took {time.monotonic() - begin_s:.1f} s with start-up")

    def _run(self, stream: BinaryIO, progress: Progress) -> int:
        def look() -> None:
            done = steps_done(self.place)
            at = f"step {done} of {self.num_steps}" if done else "up to train()"
            progress.show(f"{self.label}, {at}", done, self.num_steps)

        return run_program(self.program, self.environment, stream, self.marker, self.limit_s, look)


def tell_output(output: RunOutput, progress: Progress, what: str) -> None:
    """Shows the end of a run's output, and where all of it is.

    Args:
        what: A sentence in front of that.
    """
    progress.clear()
    if tail := output.tail():
        print(tail, file=sys.stderr)
    progress.say(f"{what}All of its output: {output.path}")
