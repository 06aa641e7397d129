"""`input()` and `getpass()`: asked once, on rank 0, and answered on all ranks of this machine.

Ranks above 0 have no terminal. What is typed in a script may be a secret, so it goes through files in the run's
private folder, and not through the store. Needs no torch.
"""

from __future__ import annotations

import builtins
import getpass
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unsloth_multigpu.errors import RankTimeoutError
from unsloth_multigpu.wire.digest import digest_of
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.wait import wait_until

# A person answers. Rank 0 may have ended meanwhile: then the supervisor ends this rank.
_ANSWER_LIMIT_S = 24 * 3600.0
# What the other ranks raise where rank 0 got no answer. A script may catch it, on all ranks.
_KINDS: dict[str, type[BaseException]] = {"EOFError": EOFError, "KeyboardInterrupt": KeyboardInterrupt}


class SharedInput:
    """What the user types is typed once, by functions in the place of `builtins.input` and `getpass.getpass`.

    Args:
        make: Takes the question, which is the same text on all ranks, and what asks it; returns the answer. It calls
            the latter on rank 0, and waits for the answer on the others.
    """

    def __init__(self, make: Callable[[str, Callable[[], str]], Any]) -> None:
        self._make = make
        self._before: tuple[Callable[..., str], Callable[..., str]] = (builtins.input, getpass.getpass)
        self._is_open = False

    def open(self) -> None:
        """Replaces both."""
        if not self._is_open:
            self._is_open = True
            self._before = (builtins.input, getpass.getpass)
            builtins.input, getpass.getpass = self.input, self.getpass

    def close(self) -> None:
        """Restores those in whose place the program has not put its own."""
        if self._is_open:
            self._is_open = False
            if builtins.input == self.input:
                builtins.input = self._before[0]
            if getpass.getpass == self.getpass:
                getpass.getpass = self._before[1]

    # `from getpass import getpass` keeps these for later: they call the original that was found last.
    def input(self, *args: Any) -> Any:
        """Replaces `input`."""
        return self._make(_question("input", args), lambda: self._before[0](*args))

    def getpass(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces `getpass.getpass`."""
        return self._make(_question("getpass", args), lambda: self._before[1](*args, **kwargs))


def _question(name: str, args: tuple[Any, ...]) -> str:
    return f"{name}({str(args[0])!r})" if args else f"{name}()"


@contextmanager
def questions_shared(run_dir: Path, identity: RankIdentity, attempt: int, beat: HeartbeatPage) -> Iterator[None]:
    """Shares what is typed at the prompts of a script.

    Args:
        run_dir: The run's private folder.
        identity: Place of this rank.
        attempt: How often the ranks were started before: they ask again then.
        beat: This rank's page. Waiting for a person is no hang.
    """
    num_asked: Counter[str] = Counter()

    def make(what: str, ask: Callable[[], str]) -> str:
        num_asked[what] += 1
        path = run_dir / f"answer_{digest_of([attempt, what, num_asked[what]])}"
        with beat.within(Phase.SCRIPT):
            return _ask(ask, path) if identity.rank == 0 else _receive(path, identity.rank, what)

    shared = SharedInput(make)
    shared.open()
    try:
        yield
    finally:
        shared.close()


def _ask(original: Callable[[], str], path: Path) -> str:
    """Rank 0's part: asks, and leaves a file with the answer."""
    told: dict[str, str] = {}
    try:
        told["answer"] = original()
        return told["answer"]
    except BaseException as error:
        told |= {"kind": type(error).__name__, "error": str(error)}
        raise
    finally:
        part = path.with_suffix(".part")
        part.touch(mode=0o600)
        part.write_text(json.dumps(told), encoding="utf-8")
        part.replace(path)


def _receive(path: Path, rank: int, what: str) -> str:
    """The part of the others: what was typed on rank 0."""
    if not wait_until(path.exists, time.monotonic() + _ANSWER_LIMIT_S):
        raise RankTimeoutError(
            f"rank {rank} waited a day for the answer to {what}.", hint="Ask on all ranks or on none of them."
        )
    told = json.loads(path.read_text(encoding="utf-8"))
    if "error" in told:
        kind = _KINDS.get(told["kind"], RuntimeError)
        raise kind(told["error"] if told["kind"] in _KINDS else f"{told['kind']} on rank 0: {told['error']}")
    return str(told["answer"])
