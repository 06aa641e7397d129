"""The experiment on DDP's settings measures each setting alone."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from torch import nn

from examples.experiments import ddp_settings


def test_gradients_of_a_setting_that_failed_are_no_memory_of_the_next(lone_group, monkeypatch) -> None:
    class Model(nn.Linear):
        def forward(self, input_ids, labels):
            return SimpleNamespace(loss=super().forward(input_ids).sum())

    model, seen = Model(2, 2), []
    model(torch.ones(1, 2), None).loss.backward()

    @contextlib.contextmanager
    def peak(_device):
        seen.append([parameter.grad for parameter in model.parameters()])
        yield [0.0]

    monkeypatch.setattr(ddp_settings, "peak_memory", peak)
    ddp_settings.measure(model, [torch.ones(1, 2)], {}, num_steps=1)
    assert seen == [[None, None]]
