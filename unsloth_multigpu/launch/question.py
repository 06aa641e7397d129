"""`input()` and `getpass()` in a script: asked once, on rank 0, and answered on all ranks.

Ranks above 0 have no terminal. A library that asks for a login, or a script that asks for a name, ran into EOFError
there. Needs no torch.
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
from typing import Any, Protocol

from unsloth_multigpu.errors import RankTimeoutError, SetupError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.beat import BeatPage, Phase, read_beats
from unsloth_multigpu.wire.digest import digest_of
from unsloth_multigpu.wire.identity import RankIdentity

logger = get_logger(__name__)

# A person answers. Rank 0 may have ended meanwhile: then the supervisor ends this rank.
_ANSWER_LIMIT_S = 24 * 3600.0
_POLL_S = 0.05
# A callback of rank 0 may ask within `train()`, and its page says "script" then.
_TRAINING_LIMIT_S = 10.0


class Answers(Protocol):
    """Where rank 0 leaves what was typed.

    Attributes:
        is_secret: Nobody else can read it there.
    """

    is_secret: bool

    def put(self, key: str, answer: str) -> None:
        """Called by rank 0."""

    def get(self, key: str) -> str | None:
        """None = not there yet."""

    def is_rank_0_training(self) -> bool:
        """True where rank 0 is known to be in `train()` and not at a prompt."""

    def forget(self) -> None:
        """Called where all ranks have passed what they asked before: nobody will read the rest."""


class FolderAnswers:
    """In the run's private folder, where all ranks are on one machine. A file is gone once its rank has read it.

    Args:
        run_dir: Only this user can read it.
        identity: Place of this rank.
    """

    is_secret = True

    def __init__(self, run_dir: str, identity: RankIdentity) -> None:
        self._run_dir = Path(run_dir)
        self._identity = identity

    def put(self, key: str, answer: str) -> None:
        """See `Answers`."""
        for rank in range(1, self._identity.world_size):
            path = self._path(key, rank)
            written = path.with_suffix(".part")
            with os.fdopen(
                os.open(written, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(answer)
            written.replace(path)

    def get(self, key: str) -> str | None:
        """See `Answers`."""
        path = self._path(key, self._identity.rank)
        if not path.exists():
            return None
        answer = path.read_text(encoding="utf-8")
        path.unlink()
        return answer

    def is_rank_0_training(self) -> bool:
        """See `Answers`."""
        beat = read_beats(self._run_dir).get(0)
        return beat is not None and beat.phase is not Phase.SCRIPT

    def forget(self) -> None:
        """See `Answers`."""
        for path in self._run_dir.glob(f"answer_*_rank_{self._identity.rank}"):
            path.unlink(missing_ok=True)

    def _path(self, key: str, rank: int) -> Path:
        return self._run_dir / f"answer_{key}_rank_{rank}"


class StoreAnswers:
    """In the store of the run, which several machines reach.

    Args:
        get_manager: Gives this rank's `DDPManager`.
    """

    is_secret = False

    def __init__(self, get_manager: Callable[[], Any]) -> None:
        self._get_manager = get_manager

    def put(self, key: str, answer: str) -> None:
        """See `Answers`."""
        self._get_manager().publish(f"answer/{key}", answer)

    def get(self, key: str) -> str | None:
        """See `Answers`."""
        manager, name = self._get_manager(), f"answer/{key}"
        return manager.wait_for(name, "an answer", timeout_s=_POLL_S) if manager.is_published(name) else None

    def is_rank_0_training(self) -> bool:
        """See `Answers`. It is not known here."""
        return False

    def forget(self) -> None:
        """See `Answers`. The store ends with the run, and no secret is in it."""


@contextmanager
def questions_shared(identity: RankIdentity, attempt: int, answers: Answers, beat: BeatPage) -> Iterator[None]:
    """Replaces `input` and `getpass.getpass` of this process.

    Ranks know a question by the place in the program that asks it, and how often it was asked there: one that rank 0
    alone asks takes nothing from the others. Its text may have the rank or the time in it.

    Args:
        identity: Place of this rank.
        attempt: How often the ranks were started before: they ask again then.
        answers: Where rank 0 leaves what was typed.
        beat: This rank's page. Waiting for a person is no hang.
    """
    shared = _Questions(identity, attempt, answers, beat)
    before = builtins.input, getpass.getpass

    def shared_input(prompt: object = "", /) -> str:
        return shared.ask("input()", lambda: before[0](prompt))

    def shared_getpass(prompt: str = "Password: ", stream: Any = None, **keywords: Any) -> str:
        if answers.is_secret:
            return shared.ask("getpass()", lambda: before[1](prompt, stream, **keywords))
        if identity.rank == 0:
            return before[1](prompt, stream, **keywords)
        raise SetupError(
            f"getpass() cannot be answered on rank {identity.rank}: what is typed on rank 0 would go over the network "
            "as it is.",
            hint="Set the secret as a variable on each machine, HF_TOKEN or WANDB_API_KEY for example.",
        )

    builtins.input, getpass.getpass = shared_input, shared_getpass
    try:
        yield
    finally:
        # A script may have put its own in their place.
        if builtins.input is shared_input:
            builtins.input = before[0]
        if getpass.getpass is shared_getpass:
            getpass.getpass = before[1]


class _Questions:
    def __init__(self, identity: RankIdentity, attempt: int, answers: Answers, beat: BeatPage) -> None:
        self._identity = identity
        self._attempt = attempt
        self._answers = answers
        self._beat = beat
        self._num_asked: Counter[str] = Counter()

    def ask(self, name: str, original: Callable[[], str]) -> str:
        frame = sys._getframe(2)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        question = f"{self._attempt} {name} {place}"
        self._num_asked[question] += 1
        key = digest_of([question, self._num_asked[question]])
        with self._beat.within(Phase.SCRIPT):
            if self._identity.rank == 0:
                return self._type(key, original)
            logger.debug("%s at %s: rank 0 asks it", name, place)
            return self._wait(key, name, place)

    def _type(self, key: str, original: Callable[[], str]) -> str:
        try:
            answer = original()
        except BaseException as error:
            # The script may catch it, on all ranks.
            self._answers.put(key, json.dumps({"kind": type(error).__name__, "error": str(error)}))
            raise
        self._answers.put(key, json.dumps({"answer": answer}))
        return answer

    def _wait(self, key: str, name: str, place: str) -> str:
        deadline_s = time.monotonic() + _ANSWER_LIMIT_S
        training_s: float | None = None
        while (text := self._answers.get(key)) is None:
            now_s = time.monotonic()
            training_s = (training_s or now_s) if self._answers.is_rank_0_training() else None
            if training_s is not None and now_s - training_s > _TRAINING_LIMIT_S:
                raise EOFError(f"{name} at {place} is not called on rank 0, which is in train()")
            if now_s > deadline_s:
                raise RankTimeoutError(
                    f"rank {self._identity.rank} waited a day for what is typed on rank 0 at {place}.",
                    hint=f"Call {name} on all ranks or on none: rank 0 may have taken another way.",
                )
            time.sleep(_POLL_S)
        told = json.loads(text)
        if "error" in told:
            kinds = {"EOFError": EOFError, "KeyboardInterrupt": KeyboardInterrupt}
            kind = kinds.get(told["kind"], RuntimeError)
            raise kind(told["error"] if told["kind"] in kinds else f"{told['kind']} on rank 0: {told['error']}")
        return str(told["answer"])
