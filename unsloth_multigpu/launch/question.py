"""Shares the answers to `input()` and `getpass()`: rank 0 asks, and all ranks of this machine get the answer.

Ranks above 0 have no terminal. An answer may be a secret, so it goes through files in the run's private folder, not
through the store. Needs no torch.
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
from unsloth_multigpu.group.outcome import failure, value_of
from unsloth_multigpu.wire.digest import digest_of
from unsloth_multigpu.wire.heartbeat import HeartbeatPage, Phase
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.wire.process import write_private
from unsloth_multigpu.wire.wait import wait_until

_PROMPTS: tuple[tuple[Any, str], ...] = ((builtins, "input"), (getpass, "getpass"))
# Long, because a person answers. If rank 0 ends meanwhile, the supervisor ends this rank.
_ANSWER_LIMIT_S = 24 * 3600.0


@contextmanager
def prompts_answered(answer: Callable[[str, Callable[[], str]], Any]) -> Iterator[None]:
    """Replaces `builtins.input` and `getpass.getpass` within the context, so that the user answers once.

    `answer` takes the call as text, equal on all ranks, and a function that asks. It returns the answer: on rank 0 by
    calling the function, on other ranks by waiting for rank 0.
    """

    def replaced(name: str, original: Callable[..., str]) -> Callable[..., Any]:
        def prompt(*args: Any, **kwargs: Any) -> Any:
            return answer(f"{name}({str(args[0])!r})" if args else f"{name}()", lambda: original(*args, **kwargs))

        return prompt

    changes = [(owner, name, before := getattr(owner, name), replaced(name, before)) for owner, name in _PROMPTS]
    for owner, name, _, ours in changes:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, before, ours in changes:
            if getattr(owner, name) is ours:  # Else the program has put its own function there.
                setattr(owner, name, before)


@contextmanager
def questions_shared(run_dir: Path, identity: RankIdentity, attempt: int, beat: HeartbeatPage) -> Iterator[None]:
    """Shares the answers to the prompts of a script within the context. Each attempt asks again.

    `beat` is this rank's heartbeat page: waiting for a person is not a hang.
    """
    num_asked: Counter[str] = Counter()

    def answer(what: str, ask: Callable[[], str]) -> str:
        num_asked[what] += 1
        path = run_dir / f"answer_{digest_of([attempt, what, num_asked[what]])}"
        with beat.within(Phase.SCRIPT):
            return _ask(ask, path) if identity.rank == 0 else _receive(path, identity.rank, what)

    with prompts_answered(answer):
        yield


def _ask(original: Callable[[], str], path: Path) -> str:
    """On rank 0: asks, and writes the answer or the error to a file."""
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = answer = original()
        return answer
    except BaseException as error:
        outcome = failure(error)
        raise
    finally:
        write_private(path, json.dumps(outcome))


def _receive(path: Path, rank: int, what: str) -> str:
    """On the other ranks: waits for rank 0's answer."""
    if not wait_until(path.exists, time.monotonic() + _ANSWER_LIMIT_S):
        raise RankTimeoutError(
            f"rank {rank} waited a day for the answer to {what}.", hint="Ask on all ranks or on none of them."
        )
    return str(value_of(json.loads(path.read_text(encoding="utf-8")), what))
