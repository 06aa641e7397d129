"""Steps are planned before they are asked for: the same plans whatever was skipped, with any number of workers."""

from __future__ import annotations

import json
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from torch import nn

from tests.helpers.step import FakeLap, InOrder, Reference
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.step.ahead import Ahead
from unsloth_multigpu.step.balance import Balancer
from unsloth_multigpu.step.cost import CostModel
from unsloth_multigpu.step.deal import Balance
from unsloth_multigpu.step.sampler import StepLoader, step_loader, steps_ahead
from unsloth_multigpu.step.step import StepShape

ROWS = [{"input_ids": [1] * (16 + 7 * (i * i % 61))} for i in range(48 * 4)]


def ids(rows: list[dict[str, list[int]]]) -> int:
    return len(rows)


class Training:
    """One rank that takes steps from a loader, and measures that the other is half as fast, and what costs are."""

    def __init__(self, num_workers: int, state: Any = None, rank: int = 0) -> None:
        manager: Any = SimpleNamespace(
            config=MultiGPUConfig(),
            identity=SimpleNamespace(rank=rank, world_size=2),
            gather_floats=lambda mine: [mine, [mine[0], *(v * (2 if i % 2 else 1) for i, v in enumerate(mine[1:]))]],
        )
        args = SimpleNamespace(device=torch.device("cpu"), length_column_name="length")
        self.balancer = Balancer(SimpleNamespace(model=nn.Linear(2, 2), args=args), manager)
        self.balancer._lengths = [len(row["input_ids"]) for row in ROWS]
        self.balancer.balance = Balance(CostModel(500.0, 0.0), (1.0, 1.0))
        shape = StepShape(rank, 2, 1, regroup=True, planner=self.balancer)
        kind = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
        reference = Reference(ROWS, batch_size=4, collate_fn=ids, **kind)  # type: ignore[arg-type]
        self.balancer._num_ahead = steps_ahead(reference)
        self.loader: Any = step_loader(reference, shape, lambda loader: loader, list)  # type: ignore[arg-type, return-value]
        self.balancer._go_on_from(state or {})

    def run(self, num_skipped: int = 0, most: int = 100) -> tuple[list[str], dict[int, Any]]:
        """The pieces of each step, and what a checkpoint after it holds."""
        loader = self.loader
        if num_skipped:
            loader.batch_sampler.num_skipped = num_skipped
            loader = skip_first_batches(loader, num_skipped)
        seen, states = [], {}
        for step, _ in zip(loader, range(most), strict=False):
            seen.append(str([micro_batch.piece for micro_batch in step.micro_batches]))
            self.balancer._laps.extend((float(w), FakeLap((w + 20) * 1e-5)) for w in (50, 200, 900))  # type: ignore[misc]
            self.balancer.end_step()
            step.plan_following()
            states[num_skipped + len(seen)] = json.loads(json.dumps(self.balancer.state_dict()))
        return seen, states


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_that_goes_on_anywhere_has_the_same_plans(num_workers: int) -> None:
    whole, states = Training(num_workers).run()
    assert len(whole) == 48
    assert len({state["overhead_tokens"] for state in states.values()}) > 1
    # Ranks exchange what they measured after steps 4, 8, 16 and 32. Laps between two exchanges are in no checkpoint.
    for step in (4, 8, 9, 16, 20, 32, 33) if num_workers == 0 else (4, 8, 32):
        assert Training(num_workers, states[step]).run(step, most=6)[0] == whole[step : step + 6], step


@pytest.mark.parametrize("num_workers", [0, 2])
def test_measurements_count_from_a_step_on_that_all_ranks_know(num_workers: int) -> None:
    training = Training(num_workers)
    training.run(most=4)
    balancer = training.balancer
    first = 5 + balancer._num_ahead
    plans = [balancer.plan(range(4), [4], number) for number in (first - 1, first)]
    assert [p.args[2] == balancer.balance for p in plans] == [False, True]  # type: ignore[union-attr]
    assert first == (6 if num_workers == 0 else 10)


class Threads(InOrder):
    """Notes where each step is planned."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def plan(self, samples: Any, sizes: Any, number: int) -> Any:
        def make() -> Any:
            self.seen.append((number, threading.current_thread() is threading.main_thread()))
            return [shape(self, rank).in_order(sizes) for rank in range(2)]

        return make


def shape(planner: Any, rank: int) -> StepShape:
    return StepShape(rank, 2, 1, regroup=True, planner=planner)


def threads_of(num_workers: int, num_skipped: int) -> list[tuple[int, bool]]:
    planner = Threads()
    kind = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    reference = Reference(ROWS[:32], batch_size=4, collate_fn=ids, **kind)  # type: ignore[arg-type]
    loader: StepLoader = step_loader(reference, shape(planner, 0), lambda loader: loader, list)  # type: ignore[arg-type, return-value]
    loader.batch_sampler.num_skipped = num_skipped  # type: ignore[union-attr]
    steps = 0
    for step in skip_first_batches(loader, num_skipped):
        step.plan_following()
        steps += 1
    assert steps == 8 - num_skipped
    return sorted(planner.seen)


def test_main_thread_plans_the_first_step_alone() -> None:
    assert threads_of(0, 0) == [(1, True), *((number, False) for number in range(2, 9))]
    assert threads_of(2, 0) == [(number, False) for number in range(1, 9)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipped_steps_are_not_planned(num_workers: int) -> None:
    assert [number for number, _ in threads_of(num_workers, 5)] == [1, 2, 3]


def test_what_fails_ahead_fails_where_it_is_asked_for() -> None:
    def fail() -> None:
        raise ValueError("no plan")

    for ahead in (Ahead(fail), pickle.loads(pickle.dumps(Ahead(fail)))):
        ahead.start()
        with pytest.raises(ValueError, match="no plan"):
            ahead.result()
    made = Ahead(lambda: [1, 2])
    assert pickle.loads(pickle.dumps(made)).result() == made.result() == [1, 2]
