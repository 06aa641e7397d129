"""One run of the user's script for `unsloth-multigpu verify`: its output goes to a file, its steps to the screen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from unsloth_multigpu.cli.screen import Progress
from unsloth_multigpu.errors import MultiGPUError, RankTimeoutError
from unsloth_multigpu.tools.verify.output import RunOutput
from unsloth_multigpu.tools.verify.tool import steps_done
from unsloth_multigpu.wire.process import end_command

_RANK_MODULE = "unsloth_multigpu.cli.script"
# The supervisor gives its ranks 30 seconds to end.
_TERMINATE_LIMIT_S = 40.0
_LOOK_S = 0.2


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
        # An absolute path: the script may change its working directory before it starts the ranks.
        name = self.program[0] if self.program[0] == "-m" else os.path.abspath(self.program[0])
        # A group of its own, which can be ended as a whole.
        process = subprocess.Popen(
            [sys.executable, "-m", _RANK_MODULE, name, *self.program[1:]],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=True,
        )
        end_s = time.monotonic() + self.limit_s
        try:
            while (code := _wait(process, end_s)) is None:
                done = steps_done(self.place)
                at = f"step {done} of {self.num_steps}" if done else "up to train()"
                progress.show(f"{self.label}, {at}", done, self.num_steps)
                if time.monotonic() >= end_s:
                    raise RankTimeoutError(
                        f"The run did not reach its end within timeout_s={self.limit_s:g} seconds.",
                        hint="Compare fewer --steps, or raise --timeout-s where it only takes long.",
                    )
        finally:
            end_command(process, self.marker, _TERMINATE_LIMIT_S)
        return 128 - code if code < 0 else code


def tell_output(output: RunOutput, progress: Progress, what: str) -> None:
    """Shows the end of a run's output, and where all of it is.

    Args:
        what: A sentence in front of that.
    """
    progress.clear()
    if tail := output.tail():
        print(tail, file=sys.stderr)
    progress.say(f"{what}All of its output: {output.path}")


def _wait(process: subprocess.Popen[bytes], end_s: float) -> int | None:
    """The exit code; None where it has not ended after a short time."""
    try:
        return process.wait(max(0.0, min(_LOOK_S, end_s - time.monotonic())))
    except subprocess.TimeoutExpired:
        return None
