"""`input()` and `getpass()` in a script: asked once, on rank 0, and answered on all ranks of this machine.

Ranks above 0 have no terminal. A library that asks for a login, or a script that asks for a name, would end with
EOFError there. What is typed may be a secret, so it goes through files that only this user can read, and not through
the store. Needs no torch.
"""

from __future__ import annotations

import builtins
import getpass
import json
import os
import sys
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
_KINDS: dict[str, type[BaseException]] = {"EOFError": EOFError, "KeyboardInterrupt": KeyboardInterrupt}


@contextmanager
def questions_shared(run_dir: Path, identity: RankIdentity, attempt: int, beat: HeartbeatPage) -> Iterator[None]:
    """Replaces `input` and `getpass.getpass` of this process.

    Ranks know a question by the place in the program that asks it, and how often it was asked there: one that rank 0
    alone asks takes nothing from the others. Its text may have the rank or the time in it.

    Args:
        run_dir: The run's private folder.
        identity: Place of this rank.
        attempt: How often the ranks were started before: they ask again then.
        beat: This rank's page. Waiting for a person is no hang.
    """
    num_asked: Counter[str] = Counter()
    before = builtins.input, getpass.getpass

    def ask(name: str, original: Callable[[], str]) -> str:
        frame = sys._getframe(2)
        what = f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}"
        question = f"{attempt} {what}"
        num_asked[question] += 1
        path = run_dir / f"answer_{digest_of([question, num_asked[question]])}"
        with beat.within(Phase.SCRIPT):
            return _type(path, identity, original) if identity.rank == 0 else _read(path, identity.rank, what)

    def shared_input(prompt: object = "", /) -> str:
        return ask("input()", lambda: before[0](prompt))

    def shared_getpass(*args: Any, **keywords: Any) -> str:
        return ask("getpass()", lambda: before[1](*args, **keywords))

    builtins.input, getpass.getpass = shared_input, shared_getpass
    try:
        yield
    finally:
        # A script may have put its own in their place.
        if builtins.input is shared_input:
            builtins.input = before[0]
        if getpass.getpass is shared_getpass:
            getpass.getpass = before[1]


def _type(path: Path, identity: RankIdentity, original: Callable[[], str]) -> str:
    """Rank 0's part: asks, and leaves a file for each other rank."""
    told: dict[str, str] = {}
    try:
        told["answer"] = original()
        return told["answer"]
    except BaseException as error:
        # The script may catch it, on all ranks.
        told |= {"kind": type(error).__name__, "error": str(error)}
        raise
    finally:
        for rank in range(1, identity.world_size):
            part = path.with_suffix(f".part_{rank}")
            with os.fdopen(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
                json.dump(told, file)
            part.replace(path.with_suffix(f".rank_{rank}"))


def _read(path: Path, rank: int, what: str) -> str:
    """The part of the others: what was typed on rank 0, whose file is gone then."""
    mine = path.with_suffix(f".rank_{rank}")
    if not wait_until(mine.exists, time.monotonic() + _ANSWER_LIMIT_S):
        raise RankTimeoutError(
            f"rank {rank} waited a day for what {what} is told on rank 0.",
            hint="Ask on all ranks or on none: rank 0 may have taken another way.",
        )
    told = json.loads(mine.read_text(encoding="utf-8"))
    mine.unlink()
    if "error" in told:
        kind = _KINDS.get(told["kind"], RuntimeError)
        raise kind(told["error"] if told["kind"] in _KINDS else f"{told['kind']} on rank 0: {told['error']}")
    return str(told["answer"])
