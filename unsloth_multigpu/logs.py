"""Loggers for ranks: INFO from rank 0, WARNING and above from every rank with its number."""

from __future__ import annotations

import logging
import os
import sys


def tell(text: str) -> None:
    """Writes text to stderr. A closed or missing stderr is not an error."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError) as gone:
        logging.getLogger(__name__).debug("stderr cannot be written: %s", gone)


def get_logger(name: str) -> logging.Logger:
    """Returns the logger `name` with the filter of ranks. Adds no handler and sets no level."""
    logger = logging.getLogger(name)
    logger.addFilter(_filter_by_rank)  # logging adds the same filter only once.
    return logger


def _filter_by_rank(record: logging.LogRecord) -> bool:
    """Drops INFO and DEBUG records of ranks above 0, and prefixes their warnings with the rank."""
    # Without LOCAL_RANK, RANK is the number of a machine, as in a pod of Kubeflow's PyTorchJob.
    rank = os.environ.get("RANK", "0") if "LOCAL_RANK" in os.environ else "0"
    # A log call never raises. `read_identity` reports an invalid RANK.
    if not rank.isdecimal() or int(rank) == 0:
        return True
    if record.levelno < logging.WARNING:
        return False
    record.msg = f"[rank {int(rank)}] {record.msg}"
    return True


class _Formatter(logging.Formatter):
    """Prefixes every line with the package's name, and warnings and errors with their level."""

    def format(self, record: logging.LogRecord) -> str:
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"unsloth_multigpu: {kind}{super().format(record)}"


class _NotebookHandler(logging.StreamHandler):  # type: ignore[type-arg]  # No class is subscripted in Python 3.10.
    """Writes INFO to stdout, because notebooks show stderr like an error."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr if record.levelno >= logging.WARNING else sys.stdout)
        super().emit(record)


class Console:
    """Shows this package's log on stderr, unless the application has configured logging before.

    The handler of `import unsloth` does not count: its format would hide the name of this package. While the console
    is open, records do not propagate to the root logger, where libraries put handlers of their own.
    """

    def __init__(self, *, is_notebook: bool = False) -> None:
        self._package = logging.getLogger("unsloth_multigpu")
        self._before = (self._package.level, self._package.propagate)
        self._handler: logging.Handler | None = None
        if self._package.level == logging.NOTSET:
            self._package.setLevel(logging.INFO)
        if not self._package.handlers and all(map(_is_of_unsloth, logging.getLogger().handlers)):
            self._handler = _NotebookHandler() if is_notebook else logging.StreamHandler()
            self._handler.setFormatter(_Formatter())
            self._package.addHandler(self._handler)
            self._package.propagate = False

    def close(self) -> None:
        """Restores the logger."""
        level, self._package.propagate = self._before
        self._package.setLevel(level)
        if self._handler is not None:
            self._package.removeHandler(self._handler)


def _is_of_unsloth(handler: logging.Handler) -> bool:
    # The format that unsloth and unsloth_zoo pass to logging.basicConfig.
    return getattr(handler.formatter, "_fmt", None) == "[%(name)s|%(levelname)s]%(message)s"
