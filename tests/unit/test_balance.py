"""What is decided before a plan is made, and what measurements change; on simulated devices no floor makes it slower.

There the real `Balancer` plans and learns; a micro-batch takes `overhead + max(floor, work)`, and what is measured of
it is noisy. Plans are judged by the times without noise.
"""

import dataclasses
import math
import random
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.board import manager_of
from unsloth_multigpu.deal.balance import _ASSUMED_ON_DEVICE, Balancer
from unsloth_multigpu.deal.deal import Balance, deal_step
from unsloth_multigpu.deal.plan import CostModel
from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.options import MultiGPUConfig

TOKENS = [[1] * n for n in (3, 40, 7, 12)]


def pad_to(most=10_000, least=0):
    def collate(rows):
        width = max(least, *(min(most, len(r["input_ids"])) for r in rows))
        return {"input_ids": torch.tensor([(r["input_ids"] + [0] * width)[:width] for r in rows])}

    collate.pad_to_multiple_of = 1
    return collate


def stacked(rows):
    return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}


def with_pictures(rows):
    return {**pad_to()(rows), "pixel_values": torch.zeros(len(rows), 3, 99)}


def loader(collate=None, tokens=None):
    return SimpleNamespace(
        dataset=[{"input_ids": t} for t in (TOKENS if tokens is None else tokens)],
        collate_fn=collate or pad_to(),
        num_workers=0,
        prefetch_factor=None,
    )


def balancer(answers=lambda mine: [mine], num_ranks=1, device="cpu", **options):
    """A balancer whose other ranks answer what a test wants."""
    args = SimpleNamespace(device=torch.device(device), length_column_name="length")
    manager = manager_of(None, 0, num_ranks, MultiGPUConfig(**options))
    manager.check_same, manager.gather_json = lambda facts: None, answers
    return Balancer(SimpleNamespace(model=nn.Linear(2, 2), args=args), manager)


def prepared(loader, **options):
    ours = balancer(**options)
    ours.prepare(loader, is_token_sum=True)
    return ours


def test_step_with_rows_that_came_later_is_dealt_in_order_or_refused():
    ours = prepared(loader())
    assert ours.plan([0, 1, 2, 3], [2, 2]) is not None
    assert ours.plan([0, 1, 2, 4], [2, 2]) is None
    with pytest.raises(SetupError, match="balance='tokens' is not possible: the data set has grown: it had 4 rows"):
        prepared(loader(), balance="tokens").plan([0, 1, 2, 4], [2, 2])


def test_rows_that_the_collator_cuts_count_as_cut():
    ours = prepared(loader(pad_to(most=10)))
    assert ours.lengths == [3, 10, 7, 10]


@pytest.mark.parametrize("balance", ["auto", "tokens"])
@pytest.mark.parametrize(
    ("data", "is_token_sum", "reason"),
    [
        (loader(pad_to(least=64)), True, "the collator turns a row of 3 tokens into 64"),
        (loader(lambda rows: {"pixels": 1}), True, "the collator makes no input_ids"),
        (loader(stacked), True, r"the collator cannot put two rows together \(ValueError: expected sequence"),
        (loader(with_pictures), True, "rows have inputs larger than input_ids: pixel_values"),
        (loader(tokens=[]), True, "the data set is empty"),
        (loader(), False, "the loss may not be a sum over the tokens of the step"),
    ],
)
def test_what_cannot_be_planned_is_said_or_an_error(data, is_token_sum, reason, balance):
    ours = balancer(balance=balance)
    if balance == "tokens":
        with pytest.raises(SetupError, match=rf"balance='tokens' is not possible: .*{reason}"):
            ours.prepare(data, is_token_sum=is_token_sum)
    else:
        assert re.match(f", dealt in order: {reason}", ours.prepare(data, is_token_sum=is_token_sum))
        assert ours.plan([0, 1], [2]) is None


def test_limit_below_the_longest_sample_is_an_error():
    with pytest.raises(ConfigError, match="max_tokens_per_micro_batch=39, but the longest sample has 40 tokens"):
        balancer(max_tokens_per_micro_batch=39).prepare(loader(), is_token_sum=True)
    make = prepared(loader(), max_tokens_per_micro_batch=40).plan([0, 1, 2, 3], [4])
    plan = make()
    assert all(len(p.positions) * max(len(TOKENS[i]) for i in p.positions) <= 40 for p in plan[0])


@pytest.mark.parametrize(("is_frozen", "part"), [(False, 0.5), (True, 0.75)])
def test_shape_of_the_model_gives_the_weight_of_attention(is_frozen, part):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 24), "adapted": nn.Identity()})
    # As a layer of PEFT: it has the sizes of the layer that it holds.
    vars(model["adapted"]).update(base_layer=model["a"], in_features=8, out_features=8)
    model.requires_grad_(not is_frozen)
    model.config = SimpleNamespace(hidden_size=8, num_hidden_layers=2)
    ours = balancer()
    ours._trainer.model = model
    ours.prepare(loader(), is_token_sum=True)
    assert ours.balance.cost.attention == pytest.approx(part * 12 * 8 * 2 / (6 * 8 * 32))


def lap(seconds):
    """A measured micro-batch."""
    return SimpleNamespace(seconds=lambda: seconds)


def measured_steps(ours, count):
    """Steps in which each micro-batch took 10 microseconds a token and 20 tokens' time besides."""
    for _ in range(count):
        ours._laps.extend((float(work), lap((work + 20) * 1e-5)) for work in (50, 200, 900))
        ours.end_step()


def test_deterministic_algorithms_leave_the_plan_alone():
    ours = prepared(loader())
    before = ours.balance
    torch.use_deterministic_algorithms(True)
    try:
        measured_steps(ours, 16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ours.balance == before


def test_rank_counts_as_slow_when_it_was_so_twice():
    ours = prepared(loader())
    ours._manager.gather_json = lambda mine: [mine, [(work, 2 * seconds) for work, seconds in mine]]
    ours._last_speeds = (1.0, 1.0)
    measured_steps(ours, 4)
    assert ours.balance.speeds == (1.0, 1.0)
    measured_steps(ours, 4)
    assert ours.balance.speeds == (1.0, 0.5)


RANKS = 2
# Before anything is measured; while fits change; after them.
WINDOWS = (0, 4, 16, 36)
SHAPES = [(8, 4), (4, 2), (8, 1)]


class Device:
    """Ranks whose micro-batches take the time that `true` says, and a balancer that plans for them."""

    def __init__(self, true, noise, seed):
        # Two, so that the samples are the same however many micro-batches are timed.
        self.true, self._noise, self._rng, self._drawn = true, noise, random.Random(seed), random.Random(seed)
        drawn = (math.exp(self._rng.gauss(math.log(150), 0.9)) for _ in range(2000))
        self.lengths = [min(2048, max(16, int(length))) for length in drawn]
        self.balancer = balancer(self._gather, RANKS, "cuda")
        self.balancer.lengths = self.lengths
        cost = dataclasses.replace(_ASSUMED_ON_DEVICE, is_padded=true.is_padded)
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
                    self.balancer._laps.append((piece.work, lap(seconds)))
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
        found = slowdowns(Device(CostModel(0, floor), noise, seed), *shape)
        assert max(found) < 1.15, (seed, found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("true", [CostModel(0.0, 512.0), CostModel(64.0, 0.0)], ids=["floor", "overhead"])
def test_measured_costs_gain_as_much_as_known_ones(true, shape):
    measured, known = (Device(true, 0.03, 5) for _ in range(2))
    known.balancer.balance = dataclasses.replace(known.balancer.balance, cost=true)
    known.balancer._fitted = lambda cost, laps: cost
    assert slowdowns(measured, *shape)[-1] < 1.05 * slowdowns(known, *shape)[-1]


def test_fitting_goes_on_until_micro_batches_show_their_work():
    device = Device(CostModel(0.0, 16384.0), 0.03, 3)
    launch_bound = slowdowns(device, 8, 1)
    assert max(launch_bound) == pytest.approx(1.0, abs=0.01)
    device.true = CostModel(0.0, 512.0)
    slowdowns(device, 8, 4)
    for _ in range(4):
        found = slowdowns(device, 8, 4)
    assert max(found) < 0.5
