"""How much sooner do several ranks train? Pure: from what both runs of a comparison have measured beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unsloth_multigpu.report import RankReport, RunReport
from unsloth_multigpu.words import gib

# A median of fewer steps is by chance. The first step is none of them: kernels are compiled in it.
MIN_STEPS = 3
COLUMNS = ("measured", "1 process")
# What shorter rows save beyond their tokens, in attention and in memory, and what a median of few steps is off by.
_TOLERANCE = 1.5


@dataclass(frozen=True)
class Speed:
    """One run. None = not known.

    Args:
        num_timed: Steps behind `step_s`.
        step_s: Median seconds of an optimizer step; None where it would be of fewer than `MIN_STEPS`.
        step_samples: Samples of such a step, of all ranks; the median of the timed ones.
        samples_per_s: In the median time.
        tokens_per_s: Tokens of a step, of all ranks, in that time; without padding.
        padding: Part of what is computed that is padding, 0.0 to 1.0.
        waiting: Part of the ranks' time in which they wait for each other, 0.0 to 1.0.
        peak_bytes: Most memory of one rank.
    """

    num_timed: int
    step_s: float | None
    step_samples: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    padding: float | None
    waiting: float | None
    peak_bytes: int | None


def speed_of(ranks: Sequence[RankReport], samples: Sequence[int]) -> Speed:
    """What the ranks of a run have measured, in one row.

    Args:
        ranks: Of the run.
        samples: How many each of its steps had, on all ranks together.
    """
    report, first = RunReport(tuple(ranks)), ranks[0]
    num_timed = max(0, first.num_steps - 1)
    step_s = first.step_s if num_timed >= MIN_STEPS else None
    step_samples = float(statistics.median(samples[1:])) if len(samples) > 1 else None
    num_tokens = report.num_tokens
    peaks = [r.peak_bytes for r in report.ranks if r.peak_bytes is not None]
    return Speed(
        num_timed=num_timed,
        step_s=step_s,
        step_samples=step_samples,
        samples_per_s=step_samples / step_s if step_samples and step_s else None,
        tokens_per_s=num_tokens / first.num_steps / step_s if num_tokens is not None and step_s else None,
        padding=report.padding,
        waiting=report.waiting if len(ranks) > 1 else None,
        peak_bytes=max(peaks, default=None),
    )


def times_as_fast(one: Speed, many: Speed) -> float | None:
    """Samples of the ranks in a second, over those of one process: steps need not have the same number of them."""
    return many.samples_per_s / one.samples_per_s if one.samples_per_s and many.samples_per_s else None


def speed_rows(one: Speed, many: Speed) -> list[tuple[str, str, str]]:
    """A line for each figure: its name, one process's, the ranks'."""
    lines = (
        ("median s per step", "step_s", _seconds),
        ("samples/s", "samples_per_s", _rate),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
        ("padding", "padding", "{:.1%}".format),
        ("waiting", "waiting", "{:.1%}".format),
        ("peak memory of a rank", "peak_bytes", gib),
    )
    rows = []
    for name, field, shown in lines:
        texts = ["-" if (value := getattr(run, field)) is None else shown(value) for run in (one, many)]
        rows.append((name, texts[0], texts[1]))
    return rows


def speed_verdict(one: Speed, many: Speed, num_ranks: int) -> list[str]:
    """One sentence, and a second one where the first is not to be believed."""
    ranks = f"{num_ranks} ranks"
    times = times_as_fast(one, many)
    if times is None or one.step_s is None or many.step_s is None or one.step_samples is None:
        timed = min(one.num_timed, many.num_timed)
        return [
            f"How much sooner {ranks} train is not said: the first step warms up, and {timed} more give no median. "
            f"Give --steps {MIN_STEPS + 1} or more."
        ]
    of = f"median of the {min(one.num_timed, many.num_timed)} steps after the first"
    steps = f"a step takes {_seconds(many.step_s)} s instead of {_seconds(one.step_s)} s, {of}"
    if many.step_samples != one.step_samples:
        samples = f"with {many.step_samples:g} samples in it instead of {one.step_samples:g}"
        more = f"{times:.2f} times as many" if times >= 1 else f"{1 / times:.1f} times fewer"
        said = [f"{ranks} train {more} samples in a second: {steps}, {samples}."]
    else:
        speed = f"train {times:.2f} times as fast" if times >= 1 else f"are {1 / times:.1f} times slower"
        said = [f"{ranks} {speed}: {steps}."]
    explained = num_ranks * _less_padding(one, many)
    if times > _TOLERANCE * explained:
        said.append(
            f"{ranks} and less padding explain about {explained:.1f} times. The rest is chance: other work on this "
            "machine, or a process that was slow alone. Measure again, with more --steps."
        )
    return said


def _less_padding(one: Speed, many: Speed) -> float:
    """How many times fewer tokens are computed for the same samples."""
    if one.padding is None or many.padding is None:
        return 1.0
    return (1 - many.padding) / (1 - one.padding)


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"
