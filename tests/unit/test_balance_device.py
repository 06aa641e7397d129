"""The planner on simulated devices: no floor makes a training slower than one whose samples are dealt in order.

The real `Balancer` plans and learns; a micro-batch takes `overhead + max(floor, work)`, and what is measured of it is
noisy. Plans are judged by the times without noise.
"""

import dataclasses
import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.step import FakeLap
from unsloth_multigpu.deal.balance import Balancer
from unsloth_multigpu.deal.cost import CostModel
from unsloth_multigpu.deal.deal import Balance, deal_step
from unsloth_multigpu.options import MultiGPUConfig

RANKS = 2
# Before anything is measured; while fits change; after them.
WINDOWS = (0, 4, 16, 36)
SHAPES = [(8, 4), (4, 2), (8, 1)]


class Device:
    """Ranks whose micro-batches take the time that `true` says, and a balancer that plans for them."""

    def __init__(self, true, kind, noise, seed, **options):
        # Two, so that the samples are the same however many micro-batches are timed.
        self.true, self._noise, self._rng, self._drawn = true, noise, random.Random(seed), random.Random(seed)
        drawn = (math.exp(self._rng.gauss(math.log(150), 0.9)) for _ in range(2000))
        self.lengths = [min(2048, max(16, int(length))) for length in drawn]
        config = MultiGPUConfig(**options)
        identity = SimpleNamespace(rank=0, world_size=RANKS)
        manager = SimpleNamespace(config=config, identity=identity, gather_json=self._gather)
        args = SimpleNamespace(device=torch.device(kind), length_column_name="length")
        self.balancer = Balancer(SimpleNamespace(model=nn.Linear(2, 2), args=args), manager)
        self.balancer.lengths = self.lengths
        cost = dataclasses.replace(self.balancer._cost(), attention=0.0, is_padded=true.is_padded)
        self.balancer.balance = Balance(cost, (1.0,) * RANKS)
        self._of_others = []

    def _gather(self, mine):
        laps, self._of_others = self._of_others[-64:], []
        return [mine, laps]

    def time(self, share, samples):
        return sum(self.true.of([self.lengths[samples[p]] for p in piece.positions]) for piece in share)

    def step(self, sizes):
        """Time of the slowest rank, as planned and in order."""
        samples = self._rng.sample(range(len(self.lengths)), sum(sizes))
        make = self.balancer.plan(samples, sizes)
        plan = make()
        for rank, share in enumerate(plan):
            for piece in share:
                seconds = 1e-5 * self.time([piece], samples) * math.exp(self._drawn.gauss(0, self._noise))
                if self.balancer.num_steps >= 2 and rank == 0:
                    self.balancer._laps.append((piece.work, FakeLap(seconds)))
                elif self.balancer.num_steps >= 2:
                    self._of_others.append((piece.work, seconds))
        self.balancer.end_step()
        in_order = deal_step(sizes, RANKS, regroup=True)
        return max(self.time(s, samples) for s in plan), max(self.time(s, samples) for s in in_order)


def slowdowns(device, rows, num_accumulated):
    """Planned over in order, in each window."""
    times = [device.step([rows] * num_accumulated) for _ in range(WINDOWS[-1])]
    return [sum(t for t, _ in times[a:b]) / sum(t for _, t in times[a:b]) for a, b in pairwise(WINDOWS)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("floor", [512, 1024, 2048, 4096, 8192, 16384])
def test_no_floor_of_a_device_makes_planned_steps_slow(floor, shape):
    for seed, noise in ((0, 0.03), (1, 0.10)):
        found = slowdowns(Device(CostModel(0, floor), "cuda", noise, seed), *shape)
        assert max(found) < 1.15, (seed, found)


def with_known_costs(true, kind):
    device = Device(true, kind, 0.03, 5)
    known = {"overhead_tokens": true.overhead_tokens, "floor_tokens": true.floor_tokens, "is_unknown": False}
    cost = dataclasses.replace(device.balancer.balance.cost, **known)
    device.balancer.balance = dataclasses.replace(device.balancer.balance, cost=cost)
    device.balancer._is_settled = True
    return device


KNOWN = [
    *(("cpu", CostModel(overhead, 0.0), 1.05, 0.65) for overhead in (8.0, 32.0, 64.0)),
    *(("cuda", CostModel(0.0, floor), 1.1, 1.0) for floor in (0.0, 512.0, 1024.0)),
]


@pytest.mark.parametrize(("kind", "true", "over_known", "most"), KNOWN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_device_gains_as_much_as_with_known_costs(shape, kind, true, over_known, most):
    measured = slowdowns(Device(true, kind, 0.03, 5), *shape)
    known = slowdowns(with_known_costs(true, kind), *shape)
    assert measured[-1] < over_known * known[-1]
    assert max(measured) < most


def test_fitting_goes_on_until_micro_batches_show_their_work():
    device = Device(CostModel(0.0, 16384.0), "cuda", 0.03, 3)
    launch_bound = slowdowns(device, 8, 1)
    assert max(launch_bound) == pytest.approx(1.0, abs=0.01)
    assert not device.balancer._is_settled
    device.true = CostModel(0.0, 512.0)
    slowdowns(device, 8, 4)
    for _ in range(4):
        found = slowdowns(device, 8, 4)
    assert device.balancer._is_settled
    assert max(found) < 0.5
    # Known costs are fitted no more.
    device.true = CostModel(0.0, 16384.0)
    before = device.balancer.balance
    slowdowns(device, 8, 4)
    assert device.balancer.balance == before
