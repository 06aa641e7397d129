"""A question is asked once, on rank 0, and answered on the rank that asks it too."""

from __future__ import annotations

import builtins
import getpass
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unsloth_multigpu.launch.question import questions_shared
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity


def identity(rank: int) -> RankIdentity:
    return RankIdentity(rank, rank, 2, 2, "unsloth_multigpu")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is typed next; an error is raised."""
    answers: list[Any] = []

    def answer(*_: Any, **__: Any) -> str:
        told = answers.pop(0)
        if isinstance(told, BaseException):
            raise told
        return str(told)

    monkeypatch.setattr(builtins, "input", answer)
    monkeypatch.setattr(getpass, "getpass", answer)
    return answers


def on_both(tmp_path: Path, program: Callable[[int], Any]) -> list[Any]:
    """Runs the program as rank 0, then as rank 1."""
    results = []
    for rank in range(2):
        with questions_shared(tmp_path, identity(rank), 0, HeartbeatPage(None, rank)):
            results.append(program(rank))
    return results


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (EOFError("x"), EOFError), (OSError("x"), RuntimeError)],
)
def test_error_at_the_prompt_reaches_the_other_rank(
    tmp_path: Path, typed: list[Any], raised: BaseException, seen: type[BaseException]
) -> None:
    typed.append(raised)

    def program(rank: int) -> None:
        with pytest.raises(type(raised) if rank == 0 else seen):
            input("? ")

    on_both(tmp_path, program)
