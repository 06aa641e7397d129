"""Estimates the time of a training on N ranks, and its bottleneck. Pure.

One rank has measured the cost of a micro-batch. Steps are divided by the same functions as in a training. The time of
the all-reduce is that of a ring: two passes, in each of which a rank sends N - 1 parts of 1 / N of the message
(Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). docs/forecast.md has
the formulas and their limits.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unsloth_multigpu.deal.deal import Balance, Plan, balance_step, check_enough_samples, deal_step
from unsloth_multigpu.deal.plan import CostModel
from unsloth_multigpu.errors import ConfigError

# DDP's bucket size. The last bucket is complete at the end of the backward pass.
_BUCKET_BYTES = 25 * 2**20
# Limit of planned samples. Steps with many samples differ little, so fewer of them are planned.
_MOST_PLANNED, _FEWEST_STEPS = 100_000, 2
# Below this efficiency another GPU is not worth it.
USEFUL = 0.5

_GIGA = 1e9
_MICRO = 1e-6


@dataclass(frozen=True)
class Link:
    """The slowest connection of a ring of ranks.

    Args:
        name: Name on the command line.
        bytes_per_s: Bandwidth of a rank in each direction.
        latency_s: Latency of one message between neighbours.
    """

    name: str
    bytes_per_s: float
    latency_s: float

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """Returns the seconds of an all-reduce of `num_bytes`."""
        passes = 2 * (num_ranks - 1)
        return passes * num_bytes / num_ranks / self.bytes_per_s + passes * self.latency_s

    def __str__(self) -> str:
        return f"{self.name} ({self.bytes_per_s / _GIGA:.3g} GB/s, {self.latency_s / _MICRO:.2g} us)"


# Bandwidths are those of NCCL's own planning, in src/graph/topo.h: SM80_NVLINK_BW (20 GB/s per link, 12 links),
# PCI_BW (12 GB/s for generation 3 with 16 lanes, half of generation 4), NET_BW (12 GB/s for 100 Gbit/s). Latencies are
# its hwLat of rings with the Simple protocol, in src/graph/tuning.cc.
NVLINK, PCIE = Link("nvlink", 240 * _GIGA, 3.4 * _MICRO), Link("pcie", 24 * _GIGA, 5.7 * _MICRO)


def parse_link(name: str, text: str) -> Link:
    """Parses the name of a link. Raises ConfigError for an unknown one."""
    for link in (NVLINK, PCIE):
        if text.lower() == link.name:
            return link
    match = re.fullmatch(r"ethernet:(\d+(?:\.\d+)?)", text.lower())
    if match is None or not (gbit := float(match[1])):
        raise ConfigError(
            f"{name}={text!r}; expected nvlink, pcie, or ethernet with its Gbit/s, such as ethernet:25.",
            hint="ethernet:1 is 1 Gbit/s.",
        )
    return Link(f"ethernet:{gbit:g}", gbit * 0.12 * _GIGA, 14.0 * _MICRO)


@dataclass(frozen=True)
class Workload:
    """A training as measured on one rank.

    Args:
        cost: Cost of a micro-batch, in tokens.
        token_s: Seconds per token.
        update_s: Seconds of a step without its micro-batches: optimizer, loading of samples, callbacks, logging.
        loading_s: The part of it in which the step waits for its samples.
        callbacks_s: The part of it in callbacks.
        steps: Tokens of each sample of some steps.
        sizes: Rows of each micro-batch of a step in one process.
        num_steps: Steps of the whole training.
        regroup: See `deal.deal_step`.
        max_tokens: See `deal.Balance`.
        gradient_bytes: Bytes of the all-reduce.
        hides: Fraction of a micro-batch that overlaps with the all-reduce; 0 = no overlap.
    """

    cost: CostModel
    token_s: float
    update_s: float
    loading_s: float
    callbacks_s: float
    steps: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    num_steps: int
    regroup: bool
    max_tokens: int | None
    gradient_bytes: int
    hides: float


@dataclass(frozen=True)
class Estimate:
    """A training on N ranks. The four shares of all ranks' time add up to 1.

    Args:
        num_ranks: N.
        step_s: Seconds of an optimizer step.
        total_s: Seconds of all steps, without start-up, evaluations and saves.
        speed_up: Relative to the script in one process with its own micro-batches.
        efficiency: Throughput per GPU, relative to one GPU with planned micro-batches.
        computing: Share of micro-batches.
        waiting: Share of waiting for the slowest rank.
        link: Share of communication that does not overlap with computing.
        update: Share of the rest: optimizer, loading, callbacks, logging.
    """

    num_ranks: int
    step_s: float
    total_s: float
    speed_up: float
    efficiency: float
    computing: float
    waiting: float
    link: float
    update: float


def estimate(work: Workload, num_ranks: int, link: Link) -> Estimate:
    """Estimates the training on `num_ranks` ranks.

    Raises ConfigError if a step has fewer samples than ranks, so that the run would fail, too.
    """
    check_enough_samples(sum(work.sizes), num_ranks)
    plans = [deal_step(work.sizes, 1, regroup=False)] * len(work.steps)
    alone_s = work.update_s + _seconds(work, plans)[1]
    if num_ranks > 1:
        num_steps = max(_FEWEST_STEPS, _MOST_PLANNED // (sum(work.sizes) * num_ranks))
        plans = [_plan(work, lengths, num_ranks) for lengths in work.steps[:num_steps]]
    compute_s, slowest_s, last_s = _seconds(work, plans)
    link_s = link.all_reduce_s(work.gradient_bytes, num_ranks)
    if work.hides:
        bucket_s = link.all_reduce_s(min(_BUCKET_BYTES, work.gradient_bytes), num_ranks)
        link_s = max(bucket_s, link_s - work.hides * last_s)
    step_s = slowest_s + link_s + work.update_s
    planned_s = work.update_s + _seconds(work, [_plan(work, lengths, 1) for lengths in work.steps])[1]
    return Estimate(
        num_ranks=num_ranks,
        step_s=step_s,
        total_s=step_s * work.num_steps,
        speed_up=alone_s / step_s,
        efficiency=1.0 if num_ranks == 1 else min(alone_s, planned_s) / (num_ranks * step_s),
        computing=compute_s / step_s,
        waiting=(slowest_s - compute_s) / step_s,
        link=link_s / step_s,
        update=work.update_s / step_s,
    )


def _plan(work: Workload, lengths: Sequence[int], num_ranks: int) -> Plan:
    balance = Balance(work.cost, (1.0,) * num_ranks, work.max_tokens)
    return balance_step(lengths, work.sizes, balance, regroup=work.regroup)


def _seconds(work: Workload, plans: Sequence[Plan]) -> tuple[float, float, float]:
    """Returns mean seconds per step: of a rank's micro-batches, of the slowest rank's, and of its last micro-batch."""
    found = []
    for lengths, plan in zip(work.steps, plans, strict=False):
        times = [[work.token_s * work.cost.of([lengths[p] for p in piece.positions]) for piece in s] for s in plan]
        slowest = max(times, key=sum)
        found.append((sum(map(sum, times)) / len(times), sum(slowest), slowest[-1]))
    compute_s, slowest_s, last_s = (statistics.fmean(values) for values in zip(*found, strict=True))
    return compute_s, slowest_s, last_s


def advise(work: Workload, rows: Sequence[Estimate]) -> list[str]:
    """Returns up to how many GPUs the efficiency is sufficient, and the bottleneck at the first number beyond."""
    beyond = next((row for row in rows if row.efficiency < USEFUL), None)
    if beyond is None:
        return [f"Useful up to {rows[-1].num_ranks:,} GPUs: the efficiency of each is at least {USEFUL:.0%}."]
    useful = max(row.num_ranks for row in rows if row.num_ranks < beyond.num_ranks)
    head = (
        f"Useful up to {useful:,} of these GPUs: with {beyond.num_ranks:,} the efficiency is {beyond.efficiency:.0%}."
    )
    more = "Raise gradient_accumulation_steps or per_device_train_batch_size, which changes the training."
    limits = {
        beyond.link: "the link. Use a faster link, more samples per step, or LoRA, which has smaller gradients.",
        beyond.waiting: f"waiting for the slowest rank: few samples per rank, of different lengths. {more}",
        beyond.update: _slow_update(work, more),
        beyond.computing - beyond.efficiency: f"micro-batches that are too small for the device. {more}",
    }
    return [head, f"The bottleneck is {limits[max(limits)]}"]


def _slow_update(work: Workload, more: str) -> str:
    """Returns what takes most of a step outside its micro-batches, and what to do."""
    if work.loading_s > work.update_s / 2:
        return (
            f"loading samples, {1000 * work.loading_s:.0f} ms of a step. Set dataloader_num_workers, or tokenize "
            "before the training."
        )
    if work.callbacks_s > work.update_s / 2:
        return f"callbacks, {1000 * work.callbacks_s:.0f} ms of a step: more GPUs do not shorten them."
    return f"work other than micro-batches: the optimizer and logging. {more}"
