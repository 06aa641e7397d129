"""Loaders: steps that are planned where they are loaded, evaluations in turns, and rows that are read twice."""

import functools
import math
import os
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from accelerate import skip_first_batches
from PIL import Image

from unsloth_multigpu.deal.deal import Step, StepShape, deal_step
from unsloth_multigpu.deal.sampler import step_loader
from unsloth_multigpu.deal.share import Turns, share_of
from unsloth_multigpu.deal.stream import StepStream
from unsloth_multigpu.errors import DivergenceError, SetupError
from unsloth_multigpu.step.step_rows import StepRows


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
    shape = StepShape(1, 2, 1, regroup=True)
    loader = step_loader(reference, shape, lambda loader: loader, list, planner=planner.plan)
    steps = list(skip_first_batches(loader, 3))
    assert [[m.inputs for m in step.micro_batches] for step in steps] == [[[4 * k + 3, 4 * k + 4]] for k in range(3, 8)]
    assert planner.asked == list(range(8))
    assert planner.made[:3].tolist() == [0, 0, 0]
    assert all((pid != os.getpid()) == (num_workers > 0) for pid in planner.made[3:].tolist())


def test_stream_without_length_and_without_a_whole_step_is_refused():
    reference = Reference(Stream(), batch_size=5, collate_fn=list)
    with pytest.raises(SetupError, match=r"after 1 micro-batch\(es\), fewer than gradient_accumulation_steps=2"):
        list(StepStream(reference, StepShape(0, 1, 2, regroup=False), list))


def test_rows_that_make_no_step_are_an_error():
    def made(rows, batch_size, *, drop_last=False):
        loader = torch.utils.data.DataLoader(rows, batch_size=batch_size, drop_last=drop_last)
        return step_loader(loader, StepShape(0, 2, 1, regroup=True), lambda loader: loader, list)

    assert made(ROWS, 32, drop_last=True)
    with pytest.raises(SetupError, match=r"32 row\(s\) are no full batch of 33, and dataloader_drop_last=True"):
        made(ROWS, 33, drop_last=True)
    for ready in (ROWS, Stream()):
        with pytest.raises(SetupError, match="ready batches"):
            made(ready, None)


@pytest.mark.parametrize("num_batches", [0, 1, 2, 3, 4])
def test_ranks_take_turns_and_have_as_many_batches(num_batches):
    batches = [[4 * i, 4 * i + 1] for i in range(num_batches)]
    ranks = [Turns(batches, lambda: batches, rank, 3) for rank in range(3)]
    found = [list(turns) for turns in ranks]
    assert {len(mine) for mine in found} == {len(ranks[0])} == {math.ceil(num_batches / 3)}
    assert {turns.num_batches for turns in ranks} == {num_batches}
    in_order = [batch for of_round in zip(*found, strict=True) for batch in of_round]
    assert in_order[:num_batches] == batches
    assert all(batch == batches[0] for batch in in_order[num_batches:])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_stream_that_gives_ranks_other_rows_is_refused():
    said = []

    def gather_json(mine):
        said.append(mine)
        # The other rank's stream ends a batch earlier.
        return [mine, [mine[0] - (len(said) > 1), mine[1]]]

    config = SimpleNamespace(data_seed=None, dispatch_batches=None)
    accelerator = SimpleNamespace(use_seedable_sampler=True, dataloader_config=config)
    args = SimpleNamespace(device="cpu", batch_eval_metrics=False, eval_do_concat_batches=True)
    trainer = SimpleNamespace(accelerator=accelerator, args=args)
    manager = SimpleNamespace(identity=SimpleNamespace(rank=0, world_size=2), gather_json=gather_json)
    share = share_of(trainer, manager, torch.utils.data.DataLoader(Stream(), batch_size=2), is_whole=False)
    with pytest.raises(DivergenceError, match="the rows of rank 1 differ from those of rank 0"):
        list(share.loader)


def pixels(seed):
    return numpy.random.default_rng(seed).random((40, 40)).astype(numpy.float32)


@pytest.mark.parametrize(
    "row_of",
    [
        pixels,
        lambda seed: Image.fromarray((pixels(seed) * 255).astype(numpy.uint8)),
        lambda seed: torch.from_numpy(pixels(seed)),
        lambda seed: {"image": [pixels(seed)]},
        str,
    ],
    ids=["array", "picture", "tensor", "nested", "text"],
)
@pytest.mark.parametrize("is_drawn", [False, True])
def test_only_rows_with_other_values_are_drawn(row_of, is_drawn):
    calls = []

    def rows_of(samples):
        calls.append(samples)
        return [row_of(sample + 10 * len(calls) * is_drawn) for sample in samples]

    step = Step([], (2,), [0, 1])
    rows = StepRows(SimpleNamespace(rows_of=rows_of), step, 0, lambda: None)
    assert rows.data_draws == is_drawn
