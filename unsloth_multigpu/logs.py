"""Loggers that know their rank: INFO from rank 0, WARNING and above from every rank with its number."""

from __future__ import annotations

import logging
import os
import sys


class RankFilter(logging.Filter):
    """Drops INFO and DEBUG records of ranks above 0, and puts the rank before their warnings."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = os.environ.get("RANK", "0")
        # What RANK must be is said where it is read; a log call never raises.
        rank = int(text) if text.isdecimal() else 0
        if rank == 0:
            return True
        if record.levelno < logging.WARNING:
            return False
        # A record can reach the filter twice (two handlers up the tree); it must not be prefixed twice.
        if not getattr(record, "has_rank", False):
            record.msg = f"[rank {rank}] {record.msg}"
            record.has_rank = True
        return True


def tell(text: str) -> None:
    """Writes what a supervisor has to say to stderr. A terminal or a pipe that is gone ends no run."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError as gone:
        logging.getLogger(__name__).debug("nobody reads stderr: %s", gone)


def get_logger(name: str) -> logging.Logger:
    """Returns the logger `name` with the rank filter attached once. Adds no handler and sets no level."""
    logger = logging.getLogger(name)
    if not any(isinstance(f, RankFilter) for f in logger.filters):
        logger.addFilter(RankFilter())
    return logger
