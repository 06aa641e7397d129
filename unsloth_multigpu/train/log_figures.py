"""Adds five numbers of all ranks to what the Trainer logs: throughput, waiting, padding, slowest rank, memory.

Trackers get them with every line; the console shows them in every tenth, which would be three times as long with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.part import Override, Part
from unsloth_multigpu.report import NO_WAITING, rates_of
from unsloth_multigpu.seam import instance_attribute
from unsloth_multigpu.train.figures import Meter
from unsloth_multigpu.trainer_protocol import TrainerLike
from unsloth_multigpu.wire.heartbeat import Figures, read_beats
from unsloth_multigpu.wire.identity import RankIdentity
from unsloth_multigpu.words import GIB

logger = get_logger(__name__)

PREFIX = "multigpu/"
# The console shows them in every so many lines.
_LINES = 10


class LogFigures(Part):
    """Adds the numbers on rank 0, to each line with a training loss. They tell of the time since the line before.

    They are read from the pages of the ranks in `run_dir`, without a collective: those of rank 0's machine, and of rank
    0 alone where another launcher has started the ranks, which then have no common folder. A number that is not known
    is left out.
    """

    place = "log"
    may_be_missed = True

    def __init__(self, trainer: TrainerLike, meter: Meter, identity: RankIdentity, run_dir: str | None) -> None:
        self._trainer = trainer
        self._meter = meter
        self._rank = identity.rank
        self._run_dir = run_dir
        self._before: dict[int, Figures] = {}
        self._num_shown = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        from transformers import PrinterCallback, ProgressCallback

        self._before = {}
        if self._meter.is_sharded:
            logger.info("multigpu/waiting and multigpu/slowest_rank are not logged: %s", NO_WAITING)
        with ExitStack() as stack:
            for callback in self._trainer.callback_handler.callbacks:
                if isinstance(callback, PrinterCallback | ProgressCallback):
                    stack.enter_context(instance_attribute(callback, "on_log", partial(self._show, callback.on_log)))
            yield

    def overrides(self) -> dict[str, Override]:
        return {"log": self._log}

    def _log(self, original: Callable[..., Any], logs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(logs, dict) and "loss" in logs and self._meter.figures.num_steps:
            logs = {**logs, **self._numbers()}
        return original(logs, *args, **kwargs)

    def _show(self, original: Callable[..., Any], *args: Any, logs: dict[str, Any], **kwargs: Any) -> Any:
        """`on_log` of a callback that prints the line."""
        if any(name.startswith(PREFIX) for name in logs):
            self._num_shown += 1
            if self._num_shown % _LINES:
                logs = {name: value for name, value in logs.items() if not name.startswith(PREFIX)}
        return original(*args, logs=logs, **kwargs)

    def _numbers(self) -> dict[str, float]:
        beats = {} if self._run_dir is None else read_beats(self._run_dir)
        now = {rank: beat.figures for rank, beat in beats.items()} | {self._rank: self._meter.figures}
        # Of the time since the line before; a rank that is missing there began in between.
        before, self._before = self._before, now
        gone = {r: figures.since(before.get(r, Figures())) for r, figures in now.items()}
        rates = rates_of([gone[self._rank], *(figures for r, figures in gone.items() if r != self._rank)])
        found = {"tokens_per_s": rates.tokens_per_s, "padding": rates.padding, "waiting": rates.waiting}
        if rates.waiting is not None and len(gone) > 1:
            # The others wait for the rank that waits least.
            found["slowest_rank"] = min(gone, key=lambda r: gone[r]["waiting_s"] or 0.0)
        peaks = [figures.peak_bytes for figures in now.values() if figures.peak_bytes]
        found["peak_memory_gib"] = max(peaks) / GIB if peaks else None
        return {PREFIX + name: round(value, 5) for name, value in found.items() if value is not None}
