"""How much sooner do several ranks train? Pure: from what both runs of a comparison have measured beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unsloth_multigpu.report import RankReport, RunReport

# A median of fewer steps is by chance. The first step is none of them: kernels are compiled in it.
MIN_STEPS = 3
COLUMNS = ("measured", "1 process")


@dataclass(frozen=True)
class Speed:
    """One run. None = not known.

    Args:
        num_timed: Steps behind `step_s`.
        step_s: Median seconds of an optimizer step; None where it would be of fewer than `MIN_STEPS`.
        tokens_per_s: Tokens of a step, of all ranks, in that time; without padding.
        padding: Part of what is computed that is padding, 0.0 to 1.0.
        waiting: Part of the ranks' time in which they wait for each other, 0.0 to 1.0.
        peak_bytes: Most memory of one rank.
    """

    num_timed: int
    step_s: float | None
    tokens_per_s: float | None
    padding: float | None
    waiting: float | None
    peak_bytes: int | None


def speed_of(ranks: Sequence[RankReport]) -> Speed:
    """What the ranks of a run have measured, in one row."""
    report, first = RunReport(tuple(ranks)), ranks[0]
    num_timed = max(0, first.num_steps - 1)
    step_s = first.step_s if num_timed >= MIN_STEPS else None
    num_tokens = report.num_tokens
    peaks = [r.peak_bytes for r in report.ranks if r.peak_bytes is not None]
    return Speed(
        num_timed=num_timed,
        step_s=step_s,
        tokens_per_s=num_tokens / first.num_steps / step_s if num_tokens is not None and step_s else None,
        padding=report.padding,
        waiting=report.waiting if len(ranks) > 1 else None,
        peak_bytes=max(peaks, default=None),
    )


def times_as_fast(one: Speed, many: Speed) -> float | None:
    """How many steps the ranks make while one process makes one."""
    return one.step_s / many.step_s if one.step_s and many.step_s else None


def speed_rows(one: Speed, many: Speed) -> list[tuple[str, str, str]]:
    """A line for each figure: its name, one process's, the ranks'."""
    lines = (
        ("median s per step", "step_s", _seconds),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
        ("padding", "padding", "{:.1%}".format),
        ("waiting", "waiting", "{:.1%}".format),
        ("peak memory of a rank", "peak_bytes", lambda size: f"{size / 2**30:.2f} GiB"),
    )
    rows = []
    for name, field, shown in lines:
        texts = ["-" if (value := getattr(run, field)) is None else shown(value) for run in (one, many)]
        rows.append((name, texts[0], texts[1]))
    return rows


def speed_verdict(one: Speed, many: Speed, ranks: str, *, is_larger_step: bool) -> str:
    """One sentence.

    Args:
        ranks: "2 ranks".
        is_larger_step: A step of the ranks has more samples than one of one process.
    """
    times = times_as_fast(one, many)
    if times is None or one.step_s is None or many.step_s is None:
        timed = min(one.num_timed, many.num_timed)
        return (
            f"How much sooner {ranks} train is not said: the first step warms up, and {timed} more give no median. "
            f"Give --steps {MIN_STEPS + 1} or more."
        )
    of = f"median of the {min(one.num_timed, many.num_timed)} steps after the first"
    steps = f"a step takes {_seconds(many.step_s)} s instead of {_seconds(one.step_s)} s, {of}"
    if is_larger_step:
        tokens = (one.tokens_per_s or 0.0, many.tokens_per_s or 0.0)
        rate = f"{tokens[1] / tokens[0]:.2f} times the tokens in a second; " if all(tokens) else ""
        return f"{ranks}: {rate}{steps}, with more samples in it."
    slower = "" if times >= 1 else ", which is SLOWER"
    return f"{ranks} train {times:.2f} times as fast{slower}: {steps}."


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"
