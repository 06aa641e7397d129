"""A process that a rank forks and that ends as a program does: it inherits the rank's handlers, and is not the rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.run import run_python
from unsloth_multigpu.wire.event import read_events
from unsloth_multigpu.wire.process import only_here

# The alarm ends a child that would hang.
RANK = """
import os, signal, sys
from unsloth_multigpu.launch.rank import enter_rank
from unsloth_multigpu.wire.context import RunContext
from unsloth_multigpu.wire.identity import RankIdentity
identity = RankIdentity(0, 0, 1, 1, "unsloth_multigpu")
enter_rank(identity, RunContext(run_dir=sys.argv[1], supervisor_pid=os.getppid()))
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for error in (SystemExit(0), ValueError("in a forked child")):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        raise error
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_forked_child_ends_as_it_would_without_ranks(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "rank.py", tmp_path / "run"
    script.write_text(RANK)
    run_dir.mkdir()
    rank = run_python([script, run_dir], tmp_path)
    assert (rank.code, rank.out) == (0, "0\n1\n")
    assert rank.err.count("ValueError: in a forked child") == 1
    assert [e.kind for e in read_events(run_dir, attempt=0)] == ["started", "exiting"]


def test_exit_handlers_of_a_rank_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    alone = only_here(called.append)
    both = only_here(called.append, otherwise=lambda what: called.append(f"{what} of a child"))
    alone("end")
    both("end")
    assert called == ["end", "end"]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    alone("end")
    both("end")
    assert called[2:] == ["end of a child"]
