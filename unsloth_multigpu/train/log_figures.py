"""Adds five numbers to what the Trainer logs: throughput, waiting, padding, the slowest rank and peak memory.

Trackers get them with every line. The console shows them in every tenth line, because they triple its length.
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
from unsloth_multigpu.words import GIB

logger = get_logger(__name__)

PREFIX = "multigpu/"
# The console shows the numbers in one of so many lines.
_LINES = 10


class LogFigures(Part):
    """Adds the numbers on rank 0 to each line with a training loss. They describe the time since the line before.

    They are read from the heartbeat pages in `run_dir`, without a collective, so they are those of the ranks on rank
    0's machine. Ranks of another launcher have no common folder: then they are those of rank 0 alone. Unknown numbers
    are left out.
    """

    place = "log"
    may_be_missed = True

    def __init__(self, trainer: TrainerLike, meter: Meter, run_dir: str | None) -> None:
        self._trainer = trainer
        self._meter = meter
        self._run_dir = run_dir
        self._before: dict[int, Figures] = {}
        self._num_shown = 0

    @contextmanager
    def around(self) -> Iterator[None]:
        from transformers import PrinterCallback, ProgressCallback

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
        """Replaces `on_log` of a callback that prints the line."""
        if any(name.startswith(PREFIX) for name in logs):
            self._num_shown += 1
            if self._num_shown % _LINES:
                logs = {name: value for name, value in logs.items() if not name.startswith(PREFIX)}
        return original(*args, logs=logs, **kwargs)

    def _numbers(self) -> dict[str, float]:
        beats = {} if self._run_dir is None else read_beats(self._run_dir)
        # Rank 0 comes first: the rates refer to its time. A rank that is missing in `before` has begun since.
        now = {0: self._meter.figures, **{rank: beat.figures for rank, beat in beats.items() if rank}}
        before, self._before = self._before, now
        gained = {rank: figures.since(before.get(rank, Figures())) for rank, figures in now.items()}
        rates = rates_of(list(gained.values()))
        found = {"tokens_per_s": rates.tokens_per_s, "padding": rates.padding, "waiting": rates.waiting}
        if rates.waiting is not None and len(gained) > 1:
            # The others wait for the rank that waits least.
            found["slowest_rank"] = min(gained, key=lambda rank: gained[rank]["waiting_s"] or 0.0)
        peaks = [figures.peak_bytes for figures in now.values() if figures.peak_bytes]
        found["peak_memory_gib"] = max(peaks) / GIB if peaks else None
        return {PREFIX + name: round(value, 5) for name, value in found.items() if value is not None}
