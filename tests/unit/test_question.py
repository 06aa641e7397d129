"""A question is asked once, on rank 0, and answered on the rank that asks it too."""

import builtins

import pytest

from unsloth_multigpu.errors import DistributedError
from unsloth_multigpu.launch.question import questions_shared
from unsloth_multigpu.wire.heartbeat import HeartbeatPage
from unsloth_multigpu.wire.identity import RankIdentity


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyboardInterrupt(), DistributedError), (EOFError("x"), EOFError), (OSError("x"), OSError)],
)
def test_error_at_the_prompt_reaches_the_other_rank(tmp_path, monkeypatch, raised, seen):
    once = [raised]

    def ask(_):
        raise once.pop()

    monkeypatch.setattr(builtins, "input", ask)
    for rank, kind in enumerate((type(raised), seen)):
        identity, page = RankIdentity(rank, rank, 2, 2, "unsloth_multigpu"), HeartbeatPage(None, rank)
        with questions_shared(tmp_path, identity, 0, page), pytest.raises(kind):
            input("? ")
