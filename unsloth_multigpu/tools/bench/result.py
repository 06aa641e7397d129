"""What a benchmark found: records of the ranks, and the figures made of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from unsloth_multigpu.tools.bench.arm import BASELINE, REFERENCE, UNGUARDED


@dataclass(frozen=True)
class MeasuredStep:
    """One optimizer step of one rank.

    Args:
        wall_s: From the end of the step before to its own; where arms take turns, from the begin of its turn.
        cpu_s: CPU time of the process in the same span.
        compute_s: Time in forward and backward, without waiting for other ranks.
        micro_batches: Of each: rows, longest row, tokens that are no padding.
        samples: Numbers of the rows.
    """

    wall_s: float
    cpu_s: float
    compute_s: float
    micro_batches: tuple[tuple[int, int, int], ...]
    samples: tuple[int, ...]


@dataclass(frozen=True)
class EpochRecord:
    """Mean loss of the epoch's steps, and loss and share of right guesses per token of the test's rows after it."""

    train_loss: float
    test_loss: float
    accuracy: float


@dataclass(frozen=True)
class RankRecord:
    """What one rank wrote.

    Args:
        gradient_norms: One of each step; none where each rank has gradients of its own.
        peak_bytes: The most memory that it held.
        num_threads: What torch computes with.
        epochs: Where the model was tested.
        sent_bytes: For gradients and weights, in the whole training; None = not known.
        reserved_bytes: The most that torch took from the driver; None where there is none.
        planner: What our planner had measured at the end: costs of a micro-batch in tokens, speeds of the ranks.
        trainer: Module and name of the trainer's class.
        num_compiled: Functions that torch had compiled by the end of each step, again for another shape included.
        is_expandable: Whether torch's allocator has expandable segments; None where there is no card.
    """

    rank: int
    steps: tuple[MeasuredStep, ...]
    gradient_norms: tuple[float, ...]
    peak_bytes: int
    device: str
    num_threads: int
    epochs: tuple[EpochRecord, ...] = ()
    sent_bytes: int | None = None
    reserved_bytes: int | None = None
    planner: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = ""
    num_compiled: tuple[int, ...] = ()
    is_expandable: bool | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankRecord:
        """Reads what the worker left."""
        steps = tuple(
            MeasuredStep(
                step["wall_s"],
                step["cpu_s"],
                step["compute_s"],
                tuple((rows, longest, tokens) for rows, longest, tokens in step["micro_batches"]),
                tuple(step["samples"]),
            )
            for step in values["steps"]
        )
        read = {"steps", "epochs", "gradient_norms", "num_compiled"}
        others = {f.name: values[f.name] for f in fields(cls) if f.name not in read}
        others["num_compiled"] = tuple(values["num_compiled"])
        epochs = tuple(EpochRecord(**epoch) for epoch in values["epochs"])
        return cls(steps=steps, gradient_norms=tuple(values["gradient_norms"]), epochs=epochs, **others)

    def sizes(self, first_step: int = 0) -> list[tuple[int, int, int]]:
        """Rows, longest row and tokens of every micro-batch from a step on."""
        return [size for step in self.steps[first_step:] for size in step.micro_batches]


@dataclass(frozen=True)
class RunMeasure:
    """One run of one arm, over its timed steps.

    Args:
        tokens_per_s: Tokens that are no padding, of all ranks, per second.
        padding_share: Part of the computed tokens that is padding.
        waiting_share: Part of the ranks' time between the slowest one's end and their own; see `waiting_share`.
        cpu_s: CPU time of the slowest rank of each step, summed: what the run takes on a quiet machine.
        peak_bytes: Most memory of one rank.
        largest_tokens: Rows x longest row of the largest micro-batch.
        step_s: Each step's time.
    """

    tokens_per_s: float
    padding_share: float
    waiting_share: float
    cpu_s: float
    peak_bytes: int
    largest_tokens: int
    step_s: tuple[float, ...]


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """At least one value is needed."""
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True)
class ArmResult:
    """An arm over all rounds; None where the arm to compare with was not run.

    Args:
        times_baseline, times_reference: Its tokens per second divided by those of torchrun, and of one process, in
            the same round.
        norm_difference: Largest relative difference of a step's gradient norm from the one-process run; None also
            where the samples are others, since the gradients are then, too, and where each rank has its own.
        has_same_samples: Every step has the samples that it has in one process, over all ranks.
        times_unguarded: Its tokens per second divided by those of the line that guards nothing, in the same round.
        reserved_bytes: See `RankRecord`, of the rank with most.
        num_compiled: Functions that torch compiled in the warm-up and in the timed steps, of the rank with most.
        is_expandable: See `RankRecord`; True if it holds on all ranks.
    """

    name: str
    tokens_per_s: Spread
    times_baseline: Spread | None
    times_reference: Spread | None
    padding_share: Spread
    waiting_share: Spread
    cpu_s: Spread
    peak_bytes: int
    largest_tokens: int
    norm_difference: float | None
    has_same_samples: bool | None
    times_unguarded: Spread | None = None
    reserved_bytes: int | None = None
    num_compiled: tuple[int, int] = (0, 0)
    is_expandable: bool | None = None


# runs[arm][round] = records of its ranks
Runs = Mapping[str, Sequence[Sequence[RankRecord]]]


def measure_run(ranks: Sequence[RankRecord], num_warmup: int, *, meets: bool = False) -> RunMeasure:
    """Figures of one run, without its first `num_warmup` steps.

    Args:
        meets: Ranks waited for each other behind each step, as those of an arm do where arms take turns. Else who is
            late in one step may be early in the next.
    """
    timed = [rank.steps[num_warmup:] for rank in ranks]
    steps = list(zip(*timed, strict=True))
    sizes = [size for rank in ranks for size in rank.sizes(num_warmup)]
    num_tokens = sum(tokens for _, _, tokens in sizes)
    step_s = tuple(max(rank.wall_s for rank in step) for step in steps)
    wall_s = sum(step_s) if meets else max(sum(step.wall_s for step in rank) for rank in timed)
    return RunMeasure(
        tokens_per_s=num_tokens / wall_s,
        padding_share=1 - num_tokens / sum(rows * longest for rows, longest, _ in sizes),
        waiting_share=waiting_share([[rank.compute_s for rank in step] for step in steps]),
        cpu_s=sum(max(rank.cpu_s for rank in step) for step in steps),
        peak_bytes=max(rank.peak_bytes for rank in ranks),
        largest_tokens=max(rows * longest for rank in ranks for rows, longest, _ in rank.sizes()),
        step_s=step_s,
    )


def waiting_share(compute_s: Sequence[Sequence[float]]) -> float:
    """Part of the ranks' time that they wait for the slowest: sum(max - mean) / sum(max) over the steps.

    Args:
        compute_s: `compute_s[step][rank]` in seconds.
    """
    slowest = sum(max(ranks) for ranks in compute_s)
    return sum(max(ranks) - sum(ranks) / len(ranks) for ranks in compute_s) / slowest


def ratios(mine: Sequence[float], other: Sequence[float] | None) -> Spread | None:
    """Spread of the ratios within each round: what slows a whole round down cancels out."""
    return None if other is None else Spread.of(m / o for m, o in zip(mine, other, strict=True))


def norm_difference(mine: Sequence[float], other: Sequence[float]) -> float:
    """Largest relative difference over the steps; infinite where a norm is no number."""
    differences = [abs(m - o) / abs(o) if o else abs(m) for m, o in zip(mine, other, strict=True)]
    return max(d if math.isfinite(d) else math.inf for d in differences)


def samples_of_steps(ranks: Sequence[RankRecord]) -> list[list[int]]:
    """The sample numbers of each step over all ranks, sorted: how often each was computed."""
    return [sorted(s for rank in step for s in rank.samples) for step in zip(*(r.steps for r in ranks), strict=True)]


def summarize(runs: Runs, num_warmup: int, num_compared: int | None = None, *, meets: bool = False) -> list[ArmResult]:
    """One result per arm, in the order of `runs`.

    Args:
        num_compared: The gradient norms of this many steps are compared. None = of all steps.
        meets: See `measure_run`.
    """
    measures = {
        name: [measure_run(ranks, num_warmup, meets=meets) for ranks in rounds] for name, rounds in runs.items()
    }
    speeds = {name: [measure.tokens_per_s for measure in rounds] for name, rounds in measures.items()}
    reference = runs.get(REFERENCE)
    results = []
    for name, rounds in measures.items():
        pairs = list(zip(runs[name], reference, strict=True)) if reference is not None else []
        is_same = all(samples_of_steps(m) == samples_of_steps(r) for m, r in pairs) if pairs else None
        norms = [
            norm_difference(m[0].gradient_norms[:num_compared], r[0].gradient_norms[:num_compared])
            for m, r in pairs
            if m[0].gradient_norms
        ]
        results.append(
            ArmResult(
                name=name,
                tokens_per_s=Spread.of(speeds[name]),
                times_baseline=ratios(speeds[name], speeds.get(BASELINE)),
                times_reference=ratios(speeds[name], speeds.get(REFERENCE)),
                padding_share=Spread.of(m.padding_share for m in rounds),
                waiting_share=Spread.of(m.waiting_share for m in rounds),
                cpu_s=Spread.of(m.cpu_s for m in rounds),
                peak_bytes=max(m.peak_bytes for m in rounds),
                largest_tokens=max(m.largest_tokens for m in rounds),
                norm_difference=max(norms) if is_same and norms else None,
                has_same_samples=is_same,
                times_unguarded=ratios(speeds[name], speeds.get(UNGUARDED)),
                **_of_memory_and_compilation([r for ranks in runs[name] for r in ranks], num_warmup),
            )
        )
    return results


def _of_memory_and_compilation(ranks: Sequence[RankRecord], num_warmup: int) -> dict[str, Any]:
    """Fields of `ArmResult` from the records of all rounds."""
    counts = [(0, *rank.num_compiled) for rank in ranks if rank.num_compiled]
    warm = [(count[min(num_warmup, len(count) - 1)], count[-1]) for count in counts]
    expandable = [rank.is_expandable for rank in ranks if rank.is_expandable is not None]
    return {
        "reserved_bytes": max((r.reserved_bytes for r in ranks if r.reserved_bytes is not None), default=None),
        "num_compiled": max(((first, last - first) for first, last in warm), key=sum, default=(0, 0)),
        "is_expandable": all(expandable) if expandable else None,
    }
