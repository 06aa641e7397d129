"""A process that a rank forks inherits the rank's handlers, and is not the rank."""

from __future__ import annotations

import os
from typing import Any

import pytest

from unsloth_multigpu.wire.process import only_here


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
