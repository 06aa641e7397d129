"""A lap ends when the last gradient is there, and not when the backward pass has also waited for others."""

import time

import torch
from torch import nn

from unsloth_multigpu.deal.measure import Stopwatch

CPU = torch.device("cpu")
PAUSE_S = 0.05


class Slow(torch.autograd.Function):
    """Takes its time forward and backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(PAUSE_S)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(PAUSE_S)
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, *, uses_first=True):
        x = self.frozen(x)
        return self.last(Slow.apply(self.first(x) if uses_first else x.requires_grad_()))


def step(model, watch, **options):
    watch.start()
    model(torch.ones(1, 2), **options).sum().backward()
    time.sleep(4 * PAUSE_S)  # Where DDP waits for the other ranks.
    return watch.lap()


def test_lap_is_the_computation_without_the_wait():
    model = Model()
    watch = Stopwatch(lambda: model, CPU)
    begin = time.perf_counter()
    with watch.on_model():
        lap = step(model, watch)
    assert 2 * PAUSE_S <= lap.seconds() <= time.perf_counter() - begin - 4 * PAUSE_S


def test_there_is_no_lap_without_the_gradient():
    model = Model()
    watch = Stopwatch(lambda: model, CPU)
    with watch.on_model():
        assert step(model, watch) is not None
        # The step before must not be taken for this one.
        assert step(model, watch, uses_first=False) is None
