"""Arms that take turns step by step: what disturbs the machine for a while then disturbs all of them alike.

All arms of a round are started, and only one computes at a time. Each rank has two named pipes in the folder of the
round: it writes a byte into one when its step is done, and continues when it reads one from the other.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import TypeVar

from unsloth_multigpu.errors import LaunchError

_LOOK_S = 0.5
_DONE, _GO = "done", "go"
Result = TypeVar("Result")


class Turn:
    """A rank's side.

    Args:
        folder: Of the round.
        arm: The arm's name.
        rank: Of the process in its arm.

    Raises:
        LaunchError: The benchmark has ended.
    """

    def __init__(self, folder: str, arm: str, rank: int) -> None:
        try:
            # They are open at the other side as long as they exist, so that this does not wait.
            self._done = _pipe(Path(folder), arm, rank, _DONE).open("wb", buffering=0)
            self._go = _pipe(Path(folder), arm, rank, _GO).open("rb", buffering=0)
        except FileNotFoundError as error:
            raise _ended() from error

    def wait(self) -> None:
        """Says that this rank has done a step, and returns when the arm may do its next one.

        Raises:
            LaunchError: The benchmark has ended.
        """
        try:
            self._done.write(b".")
        except BrokenPipeError as error:
            raise _ended() from error
        if not self._go.read(1):
            raise _ended()


def run_together(
    num_ranks: Mapping[str, int],
    num_steps: int,
    folder: Path,
    limit_s: float,
    run: Callable[[str, Callable[[], None]], Result],
) -> dict[str, Result]:
    """Runs all arms at once, each in a thread of its own, and gives them turns.

    Args:
        num_ranks: Of each arm.
        num_steps: Of each arm.
        folder: An empty folder, which the arms know.
        limit_s: Of one turn, and of the time until all ranks have come.
        run: Runs an arm; it calls its second argument now and then, which raises where another arm has failed.

    Raises:
        LaunchError: An arm failed or took too long; the others have been ended.
    """
    stop = Event()

    def check_stop() -> None:
        if stop.is_set():
            raise LaunchError("Another arm has failed.", hint="See what it says.")

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(num_ranks)))
        pipes = {
            (arm, end): [_open(folder, arm, rank, end, stack) for rank in range(count)]
            for arm, count in num_ranks.items()
            for end in (_DONE, _GO)
        }
        stack.callback(stop.set)
        runs = {arm: pool.submit(run, arm, check_stop) for arm in num_ranks}

        def release(arm: str) -> None:
            for pipe in pipes[arm, _GO]:
                os.write(pipe, b".")

        arms = list(num_ranks)
        for arm in arms:
            _wait_for(arm, pipes[arm, _DONE], runs, limit_s)
        for step in range(num_steps):
            # Each time another arm is first.
            first = step % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                release(arm)
                _wait_for(arm, pipes[arm, _DONE], runs, limit_s)
        for arm in arms:
            release(arm)
        return {arm: one.result() for arm, one in runs.items()}


def _pipe(folder: Path, arm: str, rank: int, end: str) -> Path:
    return folder / f"{arm}.{rank}.{end}"


def _open(folder: Path, arm: str, rank: int, end: str, stack: ExitStack) -> int:
    """Makes a pipe, which goes when the stack closes: nobody can wait for it then."""
    path = _pipe(folder, arm, rank, end)
    os.mkfifo(path, 0o600)
    # For both directions, so that neither side waits for the other in `open`.
    pipe = os.open(path, os.O_RDWR)
    stack.callback(os.close, pipe)
    stack.callback(path.unlink)
    return pipe


def _wait_for(arm: str, pipes: list[int], runs: Mapping[str, Future[Result]], limit_s: float) -> None:
    """Waits until all ranks of an arm have done their step."""
    end_s = time.monotonic() + limit_s
    for pipe in pipes:
        while not select.select([pipe], [], [], min(_LOOK_S, limit_s))[0]:
            for name, one in runs.items():
                if one.done():
                    raise _of_ended(name, one)
            if time.monotonic() > end_s:
                what = f"No end of a step within {limit_s:g} s: {arm}."
                raise LaunchError(what, hint="Give --timeout-s more, or run that arm alone.")
        os.read(pipe, 1)


def _of_ended(arm: str, run: Future[Result]) -> LaunchError:
    """What an arm says that has ended before its last step."""
    wait_for([run])
    error = run.exception()
    if isinstance(error, LaunchError):
        return error
    return LaunchError(f"The arm {arm} has ended before its last step.", hint="Run it alone.")


def _ended() -> LaunchError:
    return LaunchError("The benchmark has ended.", hint="Start it again.")
