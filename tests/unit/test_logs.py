"""Which rank says what, and that the package leaves an application's logging alone."""

import logging

import pytest

from unsloth_multigpu.logs import get_logger


@pytest.mark.parametrize(
    ("level", "of_another"),
    [
        (logging.DEBUG, []),
        (logging.INFO, []),
        *((level, ["[rank 3] loss=1.5 share=50%"]) for level in (logging.WARNING, logging.ERROR, logging.CRITICAL)),
    ],
)
def test_rank_0_says_everything_and_others_warn_with_their_number(monkeypatch, caplog, level, of_another):
    for rank, shown in (("0", ["loss=1.5 share=50%"]), ("3", of_another)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        logger = get_logger(f"stub_logger_{rank}_{level}")
        logger.setLevel(logging.DEBUG)
        caplog.clear()
        logger.log(level, "loss=%s share=50%%", 1.5)
        assert caplog.messages == shown
