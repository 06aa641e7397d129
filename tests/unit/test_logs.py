"""Which rank says what, and that the package leaves an application's logging alone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest

from unsloth_multigpu.logs import get_logger

_numbers = itertools.count()
Say = Callable[[str, int], list[str]]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Say:
    """Logs a text as a rank at a level; returns what is shown."""

    def say(rank: str, level: int) -> list[str]:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        logger = get_logger(f"stub_logger_{next(_numbers)}")
        logger.setLevel(logging.DEBUG)
        caplog.clear()
        logger.log(level, "loss=%s share=50%%", 1.5)
        return caplog.messages

    return say


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR])
def test_rank_0_says_everything_without_a_number(say: Say, level: int) -> None:
    assert say("0", level) == ["loss=1.5 share=50%"]


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_other_ranks_keep_their_facts_to_themselves(say: Say, level: int) -> None:
    assert say("3", level) == []


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR, logging.CRITICAL])
def test_warnings_of_other_ranks_have_their_number(say: Say, level: int) -> None:
    assert say("3", level) == ["[rank 3] loss=1.5 share=50%"]
