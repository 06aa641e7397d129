"""`input()` and `getpass()` in a script: asked once, on rank 0, and answered on all ranks of this machine.

Ranks above 0 have no terminal. What is typed may be a secret, so it goes through files in the run's private
folder, and not through the store. Needs no torch.
"""

from __future__ import annotations

import builtins
import getpass
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
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


@contextmanager
def questions_shared(run_dir: Path, identity: RankIdentity, attempt: int, beat: HeartbeatPage) -> Iterator[None]:
    """Replaces `input` and `getpass.getpass` of this process.

    Ranks identify a question by the line of the program that asks it, and how often it was asked there.

    Args:
        run_dir: The run's private folder.
        identity: Place of this rank.
        attempt: How often the ranks were started before: they ask again then.
        beat: This rank's page. Waiting for a person is no hang.
    """
    num_asked: Counter[str] = Counter()

    def share(module: ModuleType, name: str) -> None:
        original = getattr(module, name)

        def shared(*args: Any, **keywords: Any) -> str:
            frame = sys._getframe(1)
            what = f"{name}() at {frame.f_code.co_filename}:{frame.f_lineno}"
            num_asked[what] += 1
            path = run_dir / f"answer_{digest_of([attempt, what, num_asked[what]])}"
            with beat.within(Phase.SCRIPT):
                if identity.rank == 0:
                    return _ask(lambda: original(*args, **keywords), path)
                return _receive(path, identity.rank, what)

        def restore() -> None:
            if getattr(module, name) is shared:  # Otherwise the script has put its own in its place.
                setattr(module, name, original)

        setattr(module, name, shared)
        stack.callback(restore)

    with ExitStack() as stack:
        share(builtins, "input")
        share(getpass, "getpass")
        yield


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
