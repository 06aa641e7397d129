"""A question is asked once, on rank 0, and answered on the rank that asks it too."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from unsloth_multigpu.launch.question import questions_shared
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (EOFError("x"), EOFError), (OSError("x"), RuntimeError)],
)
def test_error_at_the_prompt_reaches_the_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, seen: type[BaseException]
) -> None:
    once = [raised]

    def ask(_: str) -> str:
        raise once.pop()

    monkeypatch.setattr(builtins, "input", ask)
    for rank, kind in enumerate((type(raised), seen)):
        identity, page = RankIdentity(rank, rank, 2, 2, "unsloth_multigpu"), HeartbeatPage(None, rank)
        with questions_shared(tmp_path, identity, 0, page), pytest.raises(kind):
            input("? ")
