"""Writes what the ranks of this machine do into a file that Prometheus' textfile collector reads. Needs no torch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unsloth_multigpu.errors import LaunchError
from unsloth_multigpu.logs import get_logger
from unsloth_multigpu.wire.beat import Beat, Phase, read_beats

logger = get_logger(__name__)

EVERY_S = 1.0
_PREFIX = "unsloth_multigpu_"


@dataclass(frozen=True)
class Metric:
    """One of the file.

    Args:
        name: Without the prefix.
        kind: "gauge" or "counter". Counters begin anew with each training.
        help: What it is, with its unit.
        value: Reads it; None = it is not known.
    """

    name: str
    kind: str
    help: str
    value: Callable[[Beat], float | None]


METRICS = (
    Metric("step", "gauge", "Last finished optimizer step.", lambda b: b.step if b.step >= 0 else None),
    Metric("max_steps", "gauge", "Optimizer steps of the training.", lambda b: b.figures.max_steps),
    Metric("samples_total", "counter", "Samples whose gradient counted.", lambda b: b.figures.num_samples),
    Metric("tokens_total", "counter", "Tokens that were trained on.", lambda b: b.figures.num_tokens),
    Metric("padding_tokens_total", "counter", "Places without a token.", lambda b: b.figures.num_padding_tokens),
    Metric("waiting_seconds_total", "counter", "Time in which it waited for others.", lambda b: b.figures.waiting_s),
    Metric("loop_seconds_total", "counter", "Time from the first step to the last.", lambda b: b.figures.loop_s),
    Metric("step_seconds", "gauge", "Median time of a step.", lambda b: b.figures.step_s),
    Metric("memory_bytes", "gauge", "Memory held after the last step.", lambda b: b.figures.held_bytes),
    Metric("peak_memory_bytes", "gauge", "Most memory held so far.", lambda b: b.figures.peak_bytes),
    Metric(
        "progress_age_seconds",
        "gauge",
        "Time since the rank last said where it is.",
        lambda b: time.monotonic() - b.progress_s if b.progress_s else None,
    ),
)


class MetricsFile:
    """Writes the file every second, in a thread, and a last time at the end, which says that nothing runs any more.

    A file that cannot be written any more is told once, and tried again: the run goes on.

    Args:
        path: Of the file.
        run_dir: The run's private folder.
        job: Its label in the file.

    Raises:
        LaunchError: The file cannot be written.
    """

    def __init__(self, path: str, run_dir: Path, job: str) -> None:
        self._path = Path(os.path.abspath(path))
        self._run_dir = run_dir
        self._job = job
        self._is_told = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unsloth_multigpu-metrics", daemon=True)
        try:
            self._write(is_running=True)
        except OSError as error:
            raise LaunchError(
                f"metrics_file={str(self._path)!r} cannot be written: {error.strerror}.",
                hint="Name a file in a folder that is there, such as that of node_exporter's textfile collector.",
            ) from None

    def __enter__(self) -> MetricsFile:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and writes the last figures."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._try_to_write(is_running=False)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._try_to_write(is_running=True)

    def _try_to_write(self, *, is_running: bool) -> None:
        try:
            self._write(is_running=is_running)
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                logger.warning("metrics_file=%s cannot be written: %s", self._path, error.strerror)

    def _write(self, *, is_running: bool) -> None:
        # The collector reads names that end with .prom alone, and what is there at once.
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            part.write_text(render(read_beats(self._run_dir), self._job, is_running=is_running), encoding="utf-8")
            part.replace(self._path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def render(beats: Mapping[int, Beat], job: str, *, is_running: bool) -> str:
    """The file's text, in Prometheus' text format.

    Args:
        beats: Rank -> its page.
        job: Label of every line.
        is_running: Says the metric "running".
    """
    own = f'job="{escaped(job)}"'
    lines = _head("running", "gauge", "1 while the run's supervisor is there, 0 at its end.")
    lines.append(f"{_PREFIX}running{{{own}}} {int(is_running)}")
    for metric in METRICS:
        values = {rank: metric.value(beat) for rank, beat in sorted(beats.items())}
        if any(value is not None for value in values.values()):
            lines += _head(metric.name, metric.kind, metric.help)
            name = f"{_PREFIX}{metric.name}"
            lines += [f'{name}{{{own},rank="{r}"}} {value:.17g}' for r, value in values.items() if value is not None]
    lines += _head("phase", "gauge", "1 for what the rank is doing, 0 for what it is not.") if beats else []
    for rank, beat in sorted(beats.items()):
        for phase in Phase:
            labels = f'{own},rank="{rank}",phase="{phase.name.lower()}"'
            lines.append(f"{_PREFIX}phase{{{labels}}} {int(beat.phase == phase)}")
    return "\n".join(lines) + "\n"


def escaped(value: str) -> str:
    """The value of a label, as the format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP {_PREFIX}{name} {help}", f"# TYPE {_PREFIX}{name} {kind}"]
