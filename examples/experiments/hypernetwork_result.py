"""What the runs of `hypernetwork.py` say: means, deviations, differences seed by seed, and the conclusion from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hypernetwork_training import Arm, Run, Task

REPORT = (36.13, 42.76)  # Accuracy in percent on one and on two GPUs that the report found, one run each.
TOLERANCE = 1e-5  # Largest difference of a weight between a DDP run and its simulation.
ROUNDING = 1e-2  # Weights that are farther apart after training are not put down to another order of sums.
# Pairs (arm, other arm) whose accuracies are compared seed by seed, arm minus other.
PAIRS = (
    ("ddp", "simulated"),
    ("ddp", "one 256"),
    ("ddp, no dropout", "one 256, no dropout"),
    ("ddp same seed", "ddp"),
    ("split 128", "one 128"),
    ("half 128", "one 128"),
    ("ddp", "one 128"),
    ("ddp, lr x 2", "one 128"),
    ("one 256, lr x 2", "one 128"),
    ("one 256, 2x epochs", "one 128"),
)
# Pairs whose weights are compared as well.
WEIGHT_PAIRS = (("ddp", "simulated"), ("ddp, no dropout", "one 256, no dropout"))


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences, its standard error, and half the width of its 95 % interval (Student's t).

    Args:
        num_choices: The interval holds for all of so many differences at once (Bonferroni): one of them was chosen.
    """

    mean: float
    std_error: float
    half_width: float
    num_choices: int = 1

    @property
    def is_seen(self) -> bool:
        """The interval does not hold zero. Equal differences of few seeds prove nothing: accuracy comes in samples."""
        return abs(self.mean) > self.half_width > 0

    def __str__(self) -> str:
        low, high = self.mean - self.half_width, self.mean + self.half_width
        interval = "95 %" if self.num_choices == 1 else f"95 %, all {self.num_choices} rates at once"
        return f"{self.mean:+.2f} points ({interval}: {low:+.2f} to {high:+.2f})"


@dataclass(frozen=True)
class Results:
    """All runs of a task.

    Args:
        ranks: `ranks[rank]` = the runs that this rank made: some of those in one process, and its part of all by DDP.
    """

    task: Task
    arms: Sequence[Arm]
    ranks: Sequence[Sequence[Run]]

    @cached_property
    def runs(self) -> dict[str, list[Run]]:
        """`runs[arm]` in the order of seeds; of a DDP run, what rank 0 has."""
        by_key = {(run.arm, run.seed): run for rank in reversed(self.ranks) for run in rank}
        return {arm.name: [by_key[key] for key in sorted(by_key) if key[0] == arm.name] for arm in self.arms}

    def values(self, arm: str, field: str = "accuracy") -> list[float]:
        """One figure of an arm's runs, in the order of seeds."""
        return [float(getattr(run, field)) for run in self.runs[arm]]

    def mean_and_std(self, arm: str, field: str = "accuracy") -> tuple[float, float]:
        """Over seeds; the deviation is that of a sample (n - 1)."""
        values = self.values(arm, field)
        return statistics.fmean(values), statistics.stdev(values)

    def difference(self, arm: str, other: str, num_choices: int = 1) -> Difference:
        """Accuracy of `arm` minus that of `other`, paired by seed: same first weights, same order of samples."""
        from scipy.special import stdtrit

        pairs = [a - b for a, b in zip(self.values(arm), self.values(other), strict=True)]
        std_error = statistics.stdev(pairs) / math.sqrt(len(pairs))
        quantile = float(stdtrit(len(pairs) - 1, 1 - 0.025 / num_choices))
        return Difference(statistics.fmean(pairs), std_error, quantile * std_error, num_choices)

    def weight_gap(self, arm: str, other: str) -> float:
        """Largest difference of a weight after training between a run of `arm`, on any rank, and that of `other`."""
        reference = {run.seed: run.weights for run in self.runs[other]}
        runs = [run for rank in self.ranks for run in rank if run.arm == arm]
        return max(float((run.weights - reference[run.seed]).abs().max()) for run in runs)

    def weight_size(self, arm: str) -> float:
        """Root mean square of the weights after training, over an arm's runs: what a difference compares with."""
        return math.sqrt(statistics.fmean(float(run.weights.square().mean()) for run in self.runs[arm]))

    def swept(self, arm: str, factor: float) -> str:
        """Name of the arm with `factor` times the learning rate."""
        return arm if factor == 1 else f"{arm}, lr x {factor:g}"

    def learning_rate(self, factor: float) -> float:
        """What `factor` stands for."""
        return factor * self.task.learning_rate

    @property
    def is_exact(self) -> bool:
        """DDP and its simulation in one process end with the same weights, whatever the seed."""
        return self.weight_gap("ddp", "simulated") <= TOLERANCE

    @cached_property
    def conclusion(self) -> list[str]:
        """Sentences that the figures carry."""
        return [
            _on_simulation(self),
            _on_batch(self),
            _on_seeds(self),
            _on_split(self),
            _on_updates(self),
            _on_learning_rate(self),
            _on_signals(self),
            _on_report(self),
        ]


def _on_simulation(r: Results) -> str:
    gap, num_seeds = r.weight_gap("ddp", "simulated"), len(r.runs["ddp"])
    size = f"largest difference of a weight after training, over {num_seeds} seeds and both ranks: {gap:.1e}"
    if not r.is_exact:
        return f"**Experiment 1: DDP is NOT what one process computes from two half batches**: {size}."
    return (
        f"**Experiment 1: two ranks that average are one process with two half batches** ({size}), in which what DDP "
        "does to accuracy can be studied."
    )


def _on_batch(r: Results) -> str:
    d, plain = r.difference("ddp", "one 256"), r.difference("ddp, no dropout", "one 256, no dropout")
    verdict = "differ" if d.is_seen else "are not told apart"
    gap = r.weight_gap("ddp, no dropout", "one 256, no dropout")
    cause = (
        "both compute the same but for rounding, which grows with each update"
        if gap < ROUNDING
        else "their weights end too far apart to tell rounding, which grows with each update, from another cause"
    )
    size = r.weight_size("one 256, no dropout")
    return (
        f"**Experiment 3: DDP with 2 x 128 and one process with batch 256 {verdict}**: {d}. Without dropout {cause}: "
        f"{plain}, largest difference of a weight {gap:.1e}, where the root mean square of the weights is {size:.1e}."
    )


def _on_seeds(r: Results) -> str:
    d = r.difference("ddp same seed", "ddp")
    verdict = "makes a difference" if d.is_seen else "makes no difference that shows"
    return f"**Experiment 2: whether ranks share a seed {verdict}**: same seed minus different seeds {d}."


def _on_split(r: Results) -> str:
    d, half = r.difference("split 128", "one 128"), r.difference("half 128", "one 128")
    verdict = "makes a difference" if d.is_seen else "makes no difference that shows"
    return (
        f"**Experiment 4: the order of a distributed sampler {verdict}**: {d}. Half of the "
        f"samples, in half of the updates: {half}."
    )


def _on_updates(r: Results) -> str:
    d, twice = r.difference("ddp", "one 128"), r.difference("one 256, 2x epochs", "one 128")
    few, many = (r.runs[arm][0].num_updates for arm in ("ddp", "one 128"))
    verdict = "not told apart from" if not d.is_seen else "better than" if d.mean > 0 else "worse than"
    return (
        f"**With the same learning rate and epochs, DDP is {verdict} one process with batch 128**: {d}. It makes {few} "
        f"updates where batch 128 makes {many}. Batch 256 with as many updates, in twice the epochs: {twice}."
    )


def _on_learning_rate(r: Results) -> str:
    best = {arm: _best_factor(r, arm) for arm in ("one 128", "ddp")}
    tuned = r.difference(r.swept("ddp", best["ddp"]), r.swept("one 128", best["one 128"]))
    verdict = "not told apart from" if not tuned.is_seen else "better than" if tuned.mean > 0 else "worse than"
    return (
        f"**Each at the best learning rate of the sweep, DDP is {verdict} batch 128**: {tuned}. That is "
        f"{r.learning_rate(best['ddp']):g} for DDP and {r.learning_rate(best['one 128']):g} for batch 128, both "
        "picked on the test set, which the interval does not count. DDP at "
        f"twice the base rate minus batch 128 at the base rate: {r.difference('ddp, lr x 2', 'one 128')}."
    )


def _on_signals(r: Results) -> str:
    runs = [run for runs in r.runs.values() for run in runs]
    correlation = statistics.correlation([run.signal_std for run in runs], [run.accuracy for run in runs])
    verdict = "goes with" if correlation > 0.7 else "goes against" if correlation < -0.7 else "tells little about"
    best = max(r.runs, key=lambda arm: r.mean_and_std(arm)[0])
    widest = max(r.runs, key=lambda arm: r.mean_and_std(arm, "signal_std")[0])
    named = (
        f"{arm} ({r.mean_and_std(arm)[0]:.2f} %, deviation {r.mean_and_std(arm, 'signal_std')[0]:.3f})"
        for arm in (best, widest)
    )
    return (
        f"**A wide range of the signals {verdict} accuracy**: correlation of their deviation with accuracy "
        f"{correlation:+.2f} over {len(runs)} runs. The most accurate and the widest condition: {'; '.join(named)}."
    )


def _on_report(r: Results) -> str:
    num_rates = len(r.task.factors)
    gains = {f: r.difference(r.swept("ddp", f), r.swept("one 128", f), num_rates) for f in r.task.factors}
    top = max(gains, key=lambda f: gains[f].mean)
    gain, one = gains[top], r.difference(r.swept("one 256", top), r.swept("one 128", top), num_rates)
    noise = max(r.mean_and_std(arm)[1] for arm in ("one 128", "ddp"))
    reported = f"{REPORT[0]} to {REPORT[1]} %: {REPORT[1] - REPORT[0]:.2f} points, one run each"
    start = f"**A gain like the report's** ({reported}; here the deviation over seeds is up to {noise:.2f})"
    where = f"at {r.learning_rate(top):g}: {gain}"
    if not (gain.is_seen and gain.mean > 0):
        return f"{start}: no learning rate of the sweep shows that DDP gains over batch 128; nearest is DDP {where}."
    best = _best_factor(r, "one 128")
    too_high = f", a rate above the best for batch 128 ({r.learning_rate(best):g})" if top > best else ""
    rest = r.difference(r.swept("ddp", top), r.swept("one 256", top), num_rates)
    cause = f"The larger batch alone, without a second process, gives {one.mean / gain.mean:.0%} of the gain"
    if not one.is_seen:
        cause += ", which these seeds do not tell from nothing"
    cause += "; the rest is told apart from zero" if rest.is_seen else "; the rest is not told apart from zero"
    return (
        f"{start}: DDP gains most over batch 128 {where}{too_high}. One process with batch 256, there: {one}. DDP "
        f"minus that: {rest}. {cause}."
    )


def _best_factor(r: Results, arm: str) -> float:
    return max(r.task.factors, key=lambda f: r.mean_and_std(r.swept(arm, f))[0])
