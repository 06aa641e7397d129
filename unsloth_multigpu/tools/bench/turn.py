"""Arms that take turns step by step: what disturbs the machine for a while then disturbs all of them alike.

All arms of a round are started, and only one computes at a time. Each rank says that its step is done in a pipe that
all share, and continues when it gets a byte in a pipe of its own. Only their owner may open them.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import TypeVar

from unsloth_multigpu.errors import LaunchError

_LOOK_S = 0.5
_MAX_BYTES = 4096
Result = TypeVar("Result")


class Turn:
    """A rank's side.

    Args:
        folder: Where the conductor has made the pipes.
        arm: The arm's name, without white space.
        rank: Of this process in the arm.

    Raises:
        LaunchError: The benchmark has ended.
    """

    def __init__(self, folder: Path, arm: str, rank: int) -> None:
        self._line = _name(arm, rank) + "\n"
        with ExitStack() as stack:
            try:
                # Otherwise open() would wait for the other end, which may be gone.
                self._done = os.open(folder / "done", os.O_WRONLY | os.O_NONBLOCK)
                stack.callback(os.close, self._done)
                self._go = os.open(folder / _name(arm, rank), os.O_RDONLY | os.O_NONBLOCK)
                stack.callback(os.close, self._go)
            except OSError as error:
                raise _ended() from error
            os.set_blocking(self._go, True)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """This rank takes no more turns."""
        self._stack.close()

    def wait(self) -> None:
        """Says that this rank has done a step, and returns when the arm may do its next one.

        Raises:
            LaunchError: The benchmark has ended.
        """
        with suppress(BrokenPipeError):
            os.write(self._done, self._line.encode())
        if not os.read(self._go, 1):
            raise _ended()


class Conductor:
    """Gives the turns.

    Args:
        folder: An empty folder, for the pipes.
        num_ranks: Of each arm.
        limit_s: Of one turn, and of the time until all ranks have come.
    """

    def __init__(self, folder: Path, num_ranks: Mapping[str, int], limit_s: float) -> None:
        self._limit_s = limit_s
        self._ranks = {arm: [_name(arm, rank) for rank in range(count)] for arm, count in num_ranks.items()}
        self._waiting: set[str] = set()
        self._begun = ""
        with ExitStack() as stack:
            self._pipes = {}
            for name in ("done", *(name for names in self._ranks.values() for name in names)):
                os.mkfifo(folder / name, 0o600)
                # Both ends, so that neither opening nor reading depends on the others; a rank whose conductor is gone
                # reads the end of the pipe.
                self._pipes[name] = os.open(folder / name, os.O_RDWR)
                stack.callback(os.close, self._pipes[name])
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Ranks that wait get an error."""
        self._stack.close()

    def conduct(self, num_steps: int, check: Callable[[], None]) -> None:
        """Waits until all ranks have come, gives each arm `num_steps` turns, and lets all go.

        Args:
            check: Called now and then; raises where an arm has ended.

        Raises:
            LaunchError: A rank did not end its step within the limit.
        """
        arms = list(self._ranks)
        self._wait_for(arms, check)
        for step in range(num_steps):
            # Each time another arm is first.
            first = step % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                self._release([arm])
                self._wait_for([arm], check)
        self._release(arms)

    def _release(self, arms: Sequence[str]) -> None:
        for name in self._names(arms):
            self._waiting.remove(name)
            os.write(self._pipes[name], b".")

    def _wait_for(self, arms: Sequence[str], check: Callable[[], None]) -> None:
        end_s = time.monotonic() + self._limit_s
        while missing := set(self._names(arms)) - self._waiting:
            if time.monotonic() > end_s:
                raise LaunchError(
                    f"No end of a step within {self._limit_s:g} s: {', '.join(sorted(missing))} (arm.rank).",
                    hint="Give --timeout-s more, or run that arm alone.",
                )
            if not select.select([self._pipes["done"]], [], [], _LOOK_S)[0]:
                check()
                continue
            *lines, self._begun = (self._begun + os.read(self._pipes["done"], _MAX_BYTES).decode()).split("\n")
            self._waiting.update(lines)

    def _names(self, arms: Sequence[str]) -> list[str]:
        return [name for arm in arms for name in self._ranks[arm]]


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
        folder: An empty folder, for the pipes.
        limit_s: See `Conductor`.
        run: Runs an arm, whose ranks know `folder`; it calls its second argument now and then, which raises where
            another arm has failed.

    Raises:
        LaunchError: An arm failed or took too long; the others have been ended.
    """
    stop = Event()

    def check_stop() -> None:
        if stop.is_set():
            raise LaunchError("Another arm has failed.", hint="See what it says.")

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(num_ranks)))
        conductor = Conductor(folder, num_ranks, limit_s)
        stack.callback(conductor.close)
        stack.callback(stop.set)
        runs: dict[str, Future[Result]] = {arm: pool.submit(run, arm, check_stop) for arm in num_ranks}

        def check_runs() -> None:
            for arm, one in runs.items():
                if one.done():
                    one.result()
                    raise LaunchError(f"The arm {arm} has ended before its last step.", hint="Run it alone.")

        conductor.conduct(num_steps, check_runs)
        return {arm: one.result() for arm, one in runs.items()}


def _ended() -> LaunchError:
    return LaunchError("The benchmark has ended.", hint="Start it again.")


def _name(arm: str, rank: int) -> str:
    return f"{arm}.{rank}"
