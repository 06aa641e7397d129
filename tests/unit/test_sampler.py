"""Steps of a loader: planned where they are loaded, with what was measured, and skipped ones not at all."""

import functools
import os
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches

from unsloth_multigpu.deal.deal import deal_step
from unsloth_multigpu.deal.sampler import step_loader
from unsloth_multigpu.deal.step import StepShape


class Reference(torch.utils.data.DataLoader[Any]):
    """A loader as accelerate prepares it."""

    def set_epoch(self, epoch):
        """Its order does not depend on it."""


ROWS = [{"input_ids": [1] * (1 + i)} for i in range(32)]


class Planner:
    """Deals in order, and notes which steps are planned, and in which process."""

    def __init__(self):
        self.asked = []
        self.made = torch.zeros(8, dtype=torch.int64).share_memory_()

    def plan(self, samples, sizes):
        self.asked.append(samples[0] // 4)
        return functools.partial(_make, self.made, samples[0] // 4, sizes)


def _make(made, step, sizes):
    made[step] = os.getpid()
    return deal_step(sizes, 2, regroup=True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_step_is_planned_where_it_is_loaded_and_not_where_it_is_skipped(num_workers):
    planner = Planner()
    kind = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    reference = Reference(ROWS, batch_size=4, collate_fn=lambda rows: [len(r["input_ids"]) for r in rows], **kind)
    shape = StepShape(1, 2, 1, regroup=True, planner=planner.plan)
    loader = step_loader(reference, shape, lambda loader: loader, list)
    steps = list(skip_first_batches(loader, 3))
    assert [[m.inputs for m in step.micro_batches] for step in steps] == [[[4 * k + 3, 4 * k + 4]] for k in range(3, 8)]
    assert planner.asked == list(range(8))
    assert planner.made[:3].tolist() == [0, 0, 0]
    assert all((pid != os.getpid()) == (num_workers > 0) for pid in planner.made[3:].tolist())
