"""What a run has recorded, as what a forecast is made from. Needs no torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.step.cost import CostModel, fit_cost, fit_time
from unsloth_multigpu.step.forecast import Epochs, Mode, TimeForecast, Workload, forecast_time
from unsloth_multigpu.step.link import Network

# Steps that must be timed, or one slow step would decide.
FEWEST_STEPS = 3
# A fit that repeats what it was made from worse than this is worth a word.
TOLERANCE = 0.15
_TAKEN = (
    "num_steps",
    "is_planned",
    "regroup",
    "whole",
    "max_tokens",
    "exchange",
    "every_steps",
    "gradient_bytes",
    "weight_bytes",
    "num_units",
    "hides",
)


@dataclass(frozen=True)
class Measured:
    """One rank's run.

    Args:
        work: What a forecast is made from.
        mode: How the script asks its ranks to train.
        trained: Tokens of each sample of the timed steps, by the number of the step.
        misfit: Median difference of the timed steps from what the fitted costs say, relative.
        facts: As recorded.
        notes: What was assumed.
    """

    work: Workload
    mode: Mode
    trained: Mapping[int, tuple[int, ...]]
    misfit: float
    facts: Mapping[str, Any]
    notes: tuple[str, ...]


def read_measured(record: Mapping[str, Any]) -> Measured:
    """Fits the costs.

    Args:
        record: What `Recorder.write` has left of one rank.

    Raises:
        SetupError: Too few steps were timed.
    """
    steps = record["steps"]
    if len(steps) < FEWEST_STEPS or not record["drawn"]:
        raise SetupError(
            f"{len(steps)} step(s) could be timed; expected {FEWEST_STEPS} whole ones and more.",
            hint="Raise --steps, and max_steps of the script: the first two steps are not timed.",
        )
    samples = [(tuple(lengths), float(seconds)) for lengths, seconds in record["micro_batches"]]
    assumed = CostModel(**{**record["cost"], "possible": ()})
    by_work = [(assumed.work(lengths), seconds) for lengths, seconds in samples]
    cost = assumed if not record["is_planned"] else fit_cost(assumed, by_work)
    timing, token_s = fit_time(assumed, samples)
    work = Workload(
        cost=cost,
        timing=timing,
        token_s=token_s,
        update_s=statistics.median(max(0.0, step["seconds"] - step["computed_s"]) for step in steps),
        steps=tuple(tuple(lengths) for lengths in record["drawn"]),
        sizes=tuple(record["sizes"]),
        keeps_batch=record["asked"]["keeps_batch"],
        epochs=None if record["epochs"] is None else Epochs(**record["epochs"]),
        **{name: record[name] for name in _TAKEN},
    )
    computed: dict[int, float] = {}
    for (lengths, _), step in zip(samples, record["micro_steps"], strict=True):
        computed[step] = computed.get(step, 0.0) + work.seconds(lengths)
    misfit = statistics.median(abs(computed.get(s["step"], 0.0) / (s["computed_s"] or 1.0) - 1) for s in steps)
    trained = {int(step): tuple(lengths) for step, lengths in record["trained"].items()}
    mode: Mode = "ddp" if record["asked"]["shard"] == "off" else "sharded"
    return Measured(work, mode, trained, misfit, record, tuple(_notes(record, misfit)))


def _notes(record: Mapping[str, Any], misfit: float) -> list[str]:
    notes = []
    if record["is_cpu"]:
        notes.append("measured on a CPU: the figures are for ranks that compute as fast as this one, and not for GPUs")
    if not record["is_length_known"]:
        seen = "samples are dealt in order" if record["asked"]["keeps_batch"] else "each rank takes its own batches"
        notes.append(f"lengths of samples are those of the steps that were run, and {seen}")
    if record["asked"]["grad_compression"] == "powersgd":
        notes.append("grad_compression='powersgd' is counted as if nothing were compressed")
    if record["asked"]["shard"] == "auto":
        notes.append("shard='auto' is counted as sharded; `unsloth-multigpu plan` says what it becomes")
    if misfit > TOLERANCE:
        busy = "OMP_NUM_THREADS=1 and --clock cpu leave other programs out" if record["is_cpu"] else "raise --steps"
        notes.append(
            f"the fitted costs repeat the measured steps only within {misfit:.0%}, and the forecast is off by as much: "
            f"other programs on this machine, or shapes that were compiled; {busy}"
        )
    return notes


@dataclass(frozen=True)
class Check:
    """Forecast and reality on the same steps.

    Args:
        num_ranks: Of the run.
        forecast_s: Seconds of a step, the median of these steps.
        measured_s: The same of the slowest rank.
        ratio: Median of forecast / measured.
        first_step: What the ranks' comparison of it with one process has found, see `step.comparison`; empty without.
    """

    num_ranks: int
    forecast_s: float
    measured_s: float
    ratio: float
    first_step: Mapping[str, Any]


def check(measured: Measured, records: Sequence[Mapping[str, Any]], network: Network) -> Check:
    """Compares the forecast for several ranks with what they have measured.

    Args:
        measured: One rank's.
        records: Of each rank of a run with the same samples.
        network: What joined them.

    Raises:
        SetupError: No step is common to both runs.
    """
    num_ranks = len(records)
    slowest: dict[int, float] = {}
    for record in records:
        for step in record["steps"]:
            slowest[step["step"]] = max(step["seconds"], slowest.get(step["step"], 0.0))
    pairs = []
    for number, lengths in measured.trained.items():
        if number in slowest:
            work = dataclasses.replace(measured.work, steps=(lengths,))
            pairs.append((_step_s(work, num_ranks, network, measured.mode), slowest[number]))
    if not pairs:
        raise SetupError("No step was timed in both runs.", hint="Raise --steps.")
    ratio = statistics.median(f / m for f, m in pairs)
    forecast_s, measured_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Check(num_ranks, forecast_s, measured_s, ratio, records[0].get("first_step", {}))


def _step_s(work: Workload, num_ranks: int, network: Network, mode: Mode) -> float:
    row: TimeForecast = forecast_time(work, num_ranks, network, mode)
    return row.step_s
