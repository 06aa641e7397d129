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


@pytest.mark.parametrize(
    ("level", "of_another"),
    [
        (logging.DEBUG, []),
        (logging.INFO, []),
        *((level, ["[rank 3] loss=1.5 share=50%"]) for level in (logging.WARNING, logging.ERROR, logging.CRITICAL)),
    ],
)
def test_rank_0_says_everything_and_others_warn_with_their_number(say: Say, level: int, of_another: list[str]) -> None:
    assert say("0", level) == ["loss=1.5 share=50%"]
    assert say("3", level) == of_another
