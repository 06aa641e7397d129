"""Arms that take turns step by step: what disturbs the machine for a while then disturbs all of them alike.

All arms of a round are started, and only one computes at a time. Each rank says that its step is done on a socket in
the folder of the round, which only its owner can open, and continues when it gets a byte.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import TypeVar

from unsloth_multigpu.errors import LaunchError

_LOOK_S = 0.5
_NAME_BYTES = 64
Result = TypeVar("Result")


class Turn:
    """A rank's side.

    Args:
        folder: Of the round.
        arm: The arm's name.

    Raises:
        LaunchError: The benchmark has ended.
    """

    def __init__(self, folder: str, arm: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(Path(folder)) as address:
                self._socket.connect(address)
            self._socket.sendall(arm.encode().ljust(_NAME_BYTES))
        except OSError as error:
            raise _ended() from error

    def wait(self) -> None:
        """Says that this rank has done a step, and returns when the arm may do its next one.

        Raises:
            LaunchError: The benchmark has ended.
        """
        try:
            self._socket.sendall(b".")
            is_told = bool(self._socket.recv(1))
        except OSError as error:
            raise _ended() from error
        if not is_told:
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
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with _address(folder) as address:
            server.bind(address)
        server.listen()
        stack.callback(stop.set)
        runs = {arm: pool.submit(run, arm, check_stop) for arm in num_ranks}
        ranks = _meet(server, num_ranks, runs, limit_s, stack)
        arms = list(ranks)
        for step in range(num_steps):
            # Each time another arm is first.
            first = step % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                _release(ranks[arm])
                _wait_for(arm, ranks[arm], runs[arm], limit_s)
        for arm in arms:
            _release(ranks[arm])
        return {arm: one.result() for arm, one in runs.items()}


def _meet(
    server: socket.socket,
    num_ranks: Mapping[str, int],
    runs: Mapping[str, Future[Result]],
    limit_s: float,
    stack: ExitStack,
) -> dict[str, list[socket.socket]]:
    """Waits until all ranks of all arms have come to their first step."""
    ranks: dict[str, list[socket.socket]] = {arm: [] for arm in num_ranks}
    end_s = time.monotonic() + limit_s
    server.settimeout(_LOOK_S)
    while missing := [arm for arm, count in num_ranks.items() if len(ranks[arm]) < count]:
        if time.monotonic() > end_s:
            raise _too_late(missing, limit_s)
        for arm, one in runs.items():
            if one.done():
                raise _of_ended(arm, one, limit_s)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        stack.enter_context(connection)
        connection.settimeout(limit_s)
        ranks[connection.recv(_NAME_BYTES, socket.MSG_WAITALL).decode().strip()].append(connection)
    for arm, connections in ranks.items():
        _wait_for(arm, connections, runs[arm], limit_s)
    return ranks


def _release(ranks: Sequence[socket.socket]) -> None:
    for connection in ranks:
        connection.sendall(b".")


def _wait_for(arm: str, ranks: Sequence[socket.socket], run: Future[Result], limit_s: float) -> None:
    for connection in ranks:
        try:
            if connection.recv(1):
                continue
        except TimeoutError:
            raise _too_late([arm], limit_s) from None
        except ConnectionError:
            pass
        raise _of_ended(arm, run, limit_s)


def _of_ended(arm: str, run: Future[Result], limit_s: float) -> LaunchError:
    """What an arm says whose rank has ended; its other processes may just be ending."""
    error = run.exception() if wait_for([run], limit_s).done else None
    if isinstance(error, LaunchError):
        return error
    return LaunchError(f"The arm {arm} has ended before its last step.", hint="Run it alone.")


def _too_late(arms: Sequence[str], limit_s: float) -> LaunchError:
    what = f"No end of a step within {limit_s:g} s: {', '.join(arms)}."
    return LaunchError(what, hint="Give --timeout-s more, or run that arm alone.")


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """The socket's address by way of /proc: one may have 107 characters, and a folder more."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/turns"
    finally:
        os.close(descriptor)


def _ended() -> LaunchError:
    return LaunchError("The benchmark has ended.", hint="Start it again.")
