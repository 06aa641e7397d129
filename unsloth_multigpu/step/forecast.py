"""How long would a training take on N ranks, and why not less? Pure.

What one rank has measured says what a micro-batch costs; the plans of the steps are made by the functions that a
training deals with; `step.link` says what the exchange takes. docs/forecast.md has the formulas, and what they leave
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.deal import Balance, balance_step, check_divisible, deal_step
from unsloth_multigpu.step.link import Network
from unsloth_multigpu.step.lockstep import in_lockstep

Mode = Literal["ddp", "sharded"]
Exchange = Literal["gradients", "through one rank", "now and then"]
MOST_RANKS = 1024
# Part of a micro-batch that is its backward pass, during which gradients travel: it does twice the work of the forward
# pass, or the same where weights are frozen (see `cost.attention_factor`).
BACKWARD, BACKWARD_FROZEN = 2 / 3, 1 / 2
# DDP's bucket. The last one is complete when the backward pass is.
_BUCKET_BYTES = 25 * 2**20
# The tokens of a step are counted over all ranks.
_COUNT_BYTES = 8
# A step of many samples differs little from the next: fewer of them are planned.
_MOST_PLANNED = 300_000
_FEWEST_STEPS = 2


@dataclass(frozen=True)
class Epochs:
    """What a data set gives in one process, by which ranks that take the script's batch each make fewer steps.

    Args:
        num_batches: Micro-batches of an epoch.
        drops_last: Ranks leave out the batches that not all of them have. False = some are given samples again.
        num_epochs: After which the training ends; None = it ends after a number of steps.
    """

    num_batches: int
    drops_last: bool = False
    num_epochs: float | None = None

    def steps(self, num_ranks: int, num_accumulated: int) -> int:
        """Optimizer steps of an epoch, as accelerate deals its batches and transformers counts them; 0 = refused."""
        batches = self.num_batches // num_ranks if self.drops_last else -(-self.num_batches // num_ranks)
        return -(-batches // num_accumulated)


@dataclass(frozen=True)
class Workload:
    """A training as one rank has measured it.

    Args:
        cost: What a plan is made by.
        timing: What a micro-batch took, in tokens, see `cost.fit_time`.
        token_s: Seconds of one token.
        update_s: Seconds of a step beside its micro-batches: the optimizer, loading, logging.
        steps: Tokens of each sample of some steps, in the order of the one-process run.
        sizes: Rows of each micro-batch of a step there.
        num_steps: Of the whole training in one process.
        is_planned: Samples are dealt by their lengths, else in order.
        regroup: See `deal.deal_step`.
        whole: Micro-batches are not cut where each rank can have one, see `deal.deal_step`.
        max_tokens: See `deal.Balance`.
        keeps_batch: A step has the samples of one process; False = each rank takes as many.
        epochs: Where each rank takes as many samples as one process: what it takes them from. None = a source without
            a length.
        exchange: What ranks send to each other.
        every_steps: Steps between two meetings, where they meet now and then.
        gradient_bytes: That are sent for all trainable parameters.
        weight_bytes: Of all parameters, as sharded ranks gather them.
        num_units: Layers that sharded ranks gather one by one.
        hides: Part of a micro-batch during which DDP sends; 0 where nothing travels while the rank computes.
    """

    cost: CostModel
    timing: CostModel
    token_s: float
    update_s: float
    steps: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    num_steps: int
    is_planned: bool = True
    regroup: bool = True
    whole: bool = False
    max_tokens: int | None = None
    keeps_batch: bool = True
    epochs: Epochs | None = None
    exchange: Exchange = "gradients"
    every_steps: int = 1
    gradient_bytes: int = 0
    weight_bytes: int = 0
    num_units: int = 1
    hides: float = 0.0

    @property
    def num_samples(self) -> int:
        """Of a step in one process."""
        return sum(self.sizes)

    def has_samples(self, num_ranks: int) -> bool:
        """True if a step has a sample, or an epoch a batch, for each rank, without which the run is refused."""
        return num_ranks <= self.most_ranks

    @property
    def most_ranks(self) -> float:
        """More ranks than these are refused."""
        if self.keeps_batch:
            return self.num_samples
        return self.epochs.num_batches if self.epochs is not None and self.epochs.drops_last else math.inf

    def times_the_batch(self, num_ranks: int) -> float:
        """How many times the samples of a step in one process a step of `num_ranks` takes from the data set.

        Fewer than `num_ranks` where the last step of an epoch is not full, or samples are given again.
        """
        if self.keeps_batch:
            return 1.0
        if self.epochs is None:
            return float(num_ranks)
        one, many = (self.epochs.steps(n, len(self.sizes)) for n in (1, num_ranks))
        return min(float(num_ranks), one / many)

    def steps_on(self, num_ranks: int) -> int:
        """Of the whole training, as the run makes them."""
        if self.keeps_batch or self.epochs is None or self.epochs.num_epochs is None:
            return self.num_steps
        return math.ceil(self.epochs.num_epochs * self.epochs.steps(num_ranks, len(self.sizes)))

    def seconds(self, lengths: Sequence[int]) -> float:
        """Of one micro-batch."""
        return self.token_s * self.timing.of(lengths)

    def scaled_to(self, step_s: float) -> Workload:
        """The same with another `token_s`, by which a step in one process takes `step_s` seconds."""
        tokens = _mean([_one_rank(self, lengths, is_planned=False) for lengths in self.steps]).slowest_s / self.token_s
        return replace(self, token_s=max(0.0, step_s - self.update_s) / tokens if tokens else 0.0)


@dataclass(frozen=True)
class TimeForecast:
    """A training on N ranks. The four shares are of all ranks' time, and add up to 1.

    Args:
        num_ranks: N.
        mode: How the ranks train.
        step_s: Seconds of an optimizer step.
        num_steps: Of the training.
        computing: Share of micro-batches.
        waiting: Share of waiting for the slowest rank.
        link: Share of sending that nothing hides.
        update: Share of the rest: the optimizer, loading, logging.
        padding: Part of the computed tokens that are padding.
        speed_up: Samples of the data set in a second, over those of the script in one process.
        efficiency: Speed-up for each rank, over one process that has planned micro-batches as well.
    """

    num_ranks: int
    mode: Mode
    step_s: float
    num_steps: int
    computing: float
    waiting: float
    link: float
    update: float
    padding: float
    speed_up: float
    efficiency: float

    @property
    def total_s(self) -> float:
        """Of all steps; neither start nor evaluations nor saves."""
        return self.step_s * self.num_steps


@dataclass(frozen=True)
class _Step:
    """Seconds of one step.

    Args:
        compute_s: In micro-batches, mean over the ranks.
        slowest_s: Until the last rank has computed.
        link_s: Of sending, as far as nothing hides it.
        tokens: That were computed, and how many of them are no padding.
    """

    compute_s: float
    slowest_s: float
    link_s: float
    tokens: tuple[int, int]


def forecast_time(work: Workload, num_ranks: int, network: Network, mode: Mode = "ddp") -> TimeForecast:
    """The training on `num_ranks` ranks.

    Args:
        work: What one rank has measured.
        num_ranks: At least 1.
        network: What joins them.
        mode: How they train.

    Raises:
        ConfigError: A step has fewer samples, or an epoch fewer batches, than there are ranks: the run fails as well.
    """
    if work.keeps_batch:
        check_divisible(work.num_samples, num_ranks)
    elif num_ranks > work.most_ranks:
        raise ConfigError(
            f"{work.most_ranks} batch(es) of an epoch cannot be dealt to {num_ranks} ranks: dataloader_drop_last "
            "leaves none.",
            hint="Leave dataloader_drop_last out, or take fewer GPUs.",
        )
    alone = _mean([_one_rank(work, lengths, is_planned=False) for lengths in work.steps])
    planned = _mean([_one_rank(work, lengths, is_planned=work.is_planned) for lengths in work.steps])
    best_s = min(alone.slowest_s, planned.slowest_s) + work.update_s
    alone_s = alone.slowest_s + work.update_s
    step = alone if num_ranks == 1 else _several(work, num_ranks, network, mode)
    step_s = step.slowest_s + step.link_s + work.update_s
    times = work.times_the_batch(num_ranks)
    computed, real = step.tokens
    return TimeForecast(
        num_ranks=num_ranks,
        mode=mode if num_ranks > 1 else "ddp",
        step_s=step_s,
        num_steps=work.steps_on(num_ranks),
        computing=step.compute_s / step_s,
        waiting=(step.slowest_s - step.compute_s) / step_s,
        link=step.link_s / step_s,
        update=work.update_s / step_s,
        padding=1 - real / computed if computed else 0.0,
        speed_up=times * alone_s / step_s,
        efficiency=1.0 if num_ranks == 1 else times * best_s / (num_ranks * step_s),
    )


def curve(work: Workload, network: Network, mode: Mode = "ddp", most: int = MOST_RANKS) -> list[TimeForecast]:
    """Forecasts for 1, 2, 3, 4, 6, 8, 12, ... ranks, as far as a step has samples."""
    numbers = {*ladder(most), *([int(work.most_ranks)] if work.most_ranks <= most else [])}
    return [forecast_time(work, n, network, mode) for n in sorted(numbers) if work.has_samples(n)]


def ladder(most: int) -> list[int]:
    """Powers of two and what lies half-mode between them, up to `most`: 1, 2, 3, 4, 6, 8, 12, ..."""
    powers = [2**k for k in range(most.bit_length())]
    return sorted({n for power in powers for n in (power, power * 3 // 2) if n <= most})


def _several(work: Workload, num_ranks: int, network: Network, mode: Mode) -> _Step:
    if not work.keeps_batch:
        return _own_batches(work, num_ranks, network, mode)
    steps = _some_steps(work, num_ranks)
    if mode == "sharded":
        return _mean([_sharded(work, lengths, num_ranks, network) for lengths in steps])
    if work.exchange == "now and then":
        return _apart(work, steps, num_ranks, network)
    return _mean([_together(work, lengths, num_ranks, network) for lengths in steps])


def _some_steps(work: Workload, num_ranks: int) -> Sequence[tuple[int, ...]]:
    """As many steps as can be planned in little time, spread evenly."""
    count = max(_FEWEST_STEPS, _MOST_PLANNED // (work.num_samples * num_ranks))
    stride = max(1, len(work.steps) // count)
    return list(islice(work.steps[::stride], count))


def _deal(work: Workload, lengths: Sequence[int], num_ranks: int, *, is_lockstep: bool) -> list[list[list[int]]]:
    """Tokens of the rows of each micro-batch of each rank, as a training deals them."""
    sizes = work.sizes
    # As the feed does: micro-batches stay whole where there is one for each rank.
    whole = work.whole and (len(sizes) >= num_ranks or sizes[0] == 1)
    # Ranks that meet seldom do not wait for each other: their samples are dealt in order.
    if work.is_planned and (work.exchange != "now and then" or num_ranks == 1):
        balance = Balance(work.cost, (1.0,) * num_ranks, work.max_tokens)
        plan = balance_step(lengths, sizes, balance, regroup=work.regroup, is_lockstep=is_lockstep)
    else:
        plan = deal_step(sizes, num_ranks, regroup=work.regroup, whole=whole)
    if is_lockstep:
        plan = in_lockstep(plan, whole=whole)
    return [[[lengths[p] for p in piece.positions] for piece in share] for share in plan]


def _one_rank(work: Workload, lengths: Sequence[int], *, is_planned: bool) -> _Step:
    """One process: the script's own micro-batches, or those that a plan would make of them."""
    if is_planned and work.keeps_batch:
        (share,) = _deal(work, lengths, 1, is_lockstep=False)
    else:
        rows = iter(lengths)
        share = [list(islice(rows, size)) for size in work.sizes]
    seconds = sum(map(work.seconds, share))
    return _Step(seconds, seconds, 0.0, _tokens(work, [share]))


def _together(work: Workload, lengths: Sequence[int], num_ranks: int, network: Network) -> _Step:
    """Ranks meet once in a step, in the backward pass of their last micro-batch."""
    plan = _deal(work, lengths, num_ranks, is_lockstep=False)
    times = [[work.seconds(part) for part in share] for share in plan]
    slowest = max(times, key=sum)
    if work.exchange == "through one rank":
        exchange_s = network.by_one_rank_s(work.gradient_bytes, num_ranks)
    else:
        exchange_s = _visible_s(work, slowest[-1], network, num_ranks)
    link_s = exchange_s + network.all_reduce_s(_COUNT_BYTES, num_ranks)
    return _Step(sum(map(sum, times)) / num_ranks, sum(slowest), link_s, _tokens(work, plan))


def _visible_s(work: Workload, last_s: float, network: Network, num_ranks: int) -> float:
    """What is left of the all-reduce when the backward pass is over: at least that of the last bucket."""
    whole_s = network.all_reduce_s(work.gradient_bytes, num_ranks)
    if not work.hides:
        return whole_s
    bucket_s = network.all_reduce_s(min(_BUCKET_BYTES, work.gradient_bytes), num_ranks)
    return max(bucket_s, whole_s - work.hides * last_s)


def _sharded(work: Workload, lengths: Sequence[int], num_ranks: int, network: Network) -> _Step:
    """Ranks meet in every layer of every micro-batch for the weights, and in the last one for the gradients as well."""
    plan = _deal(work, lengths, num_ranks, is_lockstep=True)
    times = [[work.seconds(part) for part in share] for share in plan]
    rounds = [max(seconds) for seconds in zip(*times, strict=True)]
    link_s = _gathered_s(work, rounds, network, num_ranks) + network.all_reduce_s(_COUNT_BYTES, num_ranks)
    return _Step(sum(map(sum, times)) / num_ranks, sum(rounds), link_s, _tokens(work, plan))


def _gathered_s(work: Workload, rounds: Sequence[float], network: Network, num_ranks: int) -> float:
    """Seconds that shards are seen to cost: two passes of the weights in each micro-batch, one of the gradients in the
    last.

    Args:
        rounds: Seconds that the slowest rank computes in each micro-batch.
    """
    weights_s = 2 * network.pass_s(work.weight_bytes / work.num_units, num_ranks)
    gradients_s = network.pass_s(work.gradient_bytes / work.num_units, num_ranks)
    visible_s = 0.0
    for number, seconds in enumerate(rounds, 1):
        one_s = weights_s + (gradients_s if number == len(rounds) else 0.0)
        # The next layer is gathered while one computes; the first one has nothing to hide behind.
        visible_s += one_s + max(0.0, one_s * (work.num_units - 1) - (seconds if work.hides else 0.0))
    return visible_s


def _apart(work: Workload, steps: Sequence[Sequence[int]], num_ranks: int, network: Network) -> _Step:
    """Ranks meet after every `every_steps` steps: each has computed its own parts of them by then."""
    plans = [_deal(work, lengths, num_ranks, is_lockstep=False) for lengths in steps]
    times = [[sum(map(work.seconds, share)) for share in plan] for plan in plans]
    every = min(work.every_steps, len(times))
    rounds = [times[start : start + every] for start in range(0, len(times) - every + 1, every)]
    slowest_s = [max(map(sum, zip(*part, strict=True))) / every for part in rounds]
    means = [sum(map(sum, part)) / num_ranks / every for part in rounds]
    tokens = [_tokens(work, plan) for plan in plans]
    link_s = network.all_reduce_s(work.gradient_bytes, num_ranks) / work.every_steps
    count = len(rounds)
    computed, real = (sum(t[k] for t in tokens) for k in (0, 1))
    return _Step(sum(means) / count, sum(slowest_s) / count, link_s, (computed, real))


def _own_batches(work: Workload, num_ranks: int, network: Network, mode: Mode) -> _Step:
    """Each rank takes a step of the script for itself: the slowest of N that are drawn from those that are known."""
    steps = [_one_rank(work, lengths, is_planned=False) for lengths in work.steps]
    if mode == "sharded":
        # In each micro-batch the ranks wait for the slowest.
        parts = [[work.seconds(part) for part in _in_order(lengths, work.sizes)] for lengths in work.steps]
        rounds = [expected_maximum(seconds, num_ranks) for seconds in zip(*parts, strict=True)]
        exchange_s = _gathered_s(work, rounds, network, num_ranks)
        slowest_s = sum(rounds)
    else:
        every = min(work.every_steps, len(steps)) if work.exchange == "now and then" else 1
        sums = [sum(s.slowest_s for s in steps[k : k + every]) / every for k in range(0, len(steps) - every + 1, every)]
        slowest_s = expected_maximum(sums, num_ranks)
        if work.exchange == "now and then":
            exchange_s = network.all_reduce_s(work.gradient_bytes, num_ranks) / work.every_steps
        elif work.exchange == "through one rank":
            exchange_s = network.by_one_rank_s(work.gradient_bytes, num_ranks)
        else:
            exchange_s = _visible_s(work, slowest_s / len(work.sizes), network, num_ranks)
    mean = _mean(steps)
    link_s = exchange_s + network.all_reduce_s(_COUNT_BYTES, num_ranks)
    return _Step(mean.compute_s, max(slowest_s, mean.compute_s), link_s, mean.tokens)


def expected_maximum(values: Sequence[float], count: int) -> float:
    """Mean of the largest of `count` values that are drawn from `values`, each as likely as the others."""
    ordered, total = sorted(values), len(values)
    return sum(v * (((i + 1) / total) ** count - (i / total) ** count) for i, v in enumerate(ordered))


def _in_order(lengths: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    rows = iter(lengths)
    return [list(islice(rows, size)) for size in sizes]


def _tokens(work: Workload, plan: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int]:
    parts = [part for share in plan for part in share if part]
    return sum(map(work.timing.tokens, parts)), sum(map(sum, parts))


def _mean(steps: Sequence[_Step]) -> _Step:
    def mean(value: Callable[[_Step], float]) -> float:
        return math.fsum(map(value, steps)) / len(steps)

    tokens = (sum(s.tokens[0] for s in steps), sum(s.tokens[1] for s in steps))
    return _Step(mean(lambda s: s.compute_s), mean(lambda s: s.slowest_s), mean(lambda s: s.link_s), tokens)
