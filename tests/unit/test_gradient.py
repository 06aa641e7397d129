"""Gradients that are no finite numbers, and the check of each step that finds them, without ranks."""

import math
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from tests.helpers.board import manager_of
from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import DivergenceError, NonFiniteGradientError, RankTimeoutError
from unsloth_multigpu.options import MultiGPUConfig
from unsloth_multigpu.step.passes import _without_gradient
from unsloth_multigpu.train.check import MAX_SKIPPED_IN_A_ROW, StepCheck
from unsloth_multigpu.train.lead import Lead
from unsloth_multigpu.train.loop import Loop
from unsloth_multigpu.wire.heartbeat import HeartbeatPage


class OneRank(FakeTrainer):
    """A trainer of one linear layer, and the loop's calls of one step."""

    def __init__(self, on_nan="raise", *, scaler=None, clips=True):
        super().__init__(torch.nn.Linear(2, 1, bias=False))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.accelerator.scaler = scaler
        self._clips = clips
        manager = manager_of(None, config=MultiGPUConfig(on_nan=on_nan))
        manager.gather_json = lambda value: [value]
        self.check = StepCheck(self, manager, SimpleNamespace(has_one_order=True), None)

    def checked(self):
        return Loop(self, [self.check]).steering()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(inputs["x"]).sum() * inputs.get("factor", 1.0)

    def training_step(self, model, inputs, num_items_in_batch=None):
        for micro_batch in inputs:
            self.compute_loss(model, micro_batch).backward()

    def step(self, *factors):
        """As the Trainer's loop; returns the norm that it would log."""
        self.training_step(self.model, [{"x": torch.ones(2, 2), "factor": f} for f in factors])
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0) if self._clips else None
        self.event("on_pre_optimizer_step")
        self.optimizer.step()
        self.model.zero_grad()
        self.state.global_step += 1
        return norm


@pytest.mark.parametrize("clips", [True, False])
def test_gradient_that_is_not_finite_raises_before_the_optimizer_steps(clips):
    rank = OneRank(clips=clips)
    with rank.checked():
        rank.step(1.0, 1.0)
        before = rank.model.weight.detach().clone()
        with torch.no_grad():
            rank.compute_loss(rank.model, {"x": torch.ones(2, 2)})  # A trial, which is no micro-batch of the step.
        with pytest.raises(NonFiniteGradientError) as info:
            rank.step(1.0, math.nan)
    assert info.value.args[0] == "step 2: gradient norm is nan; loss of rank 0, micro-batch 1, was nan."
    assert torch.equal(rank.model.weight, before)
    assert not rank.callback_handler.callbacks
    assert "compute_loss" not in vars(rank)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_are_clipped_as_accelerate_clips_them(norm_type):
    rank, gradient = OneRank(), torch.tensor([[3.0, -4.0]])

    def accelerates_own(*_):
        raise AssertionError("It would clip by a norm that nobody has judged.")

    accelerates_own.__module__ = "accelerate.accelerator"
    rank.accelerator.clip_grad_norm_ = accelerates_own
    rank.model.weight.grad = gradient.clone()
    by_torch = torch.nn.Parameter(torch.zeros(1, 2))
    by_torch.grad = gradient.clone()
    with rank.checked():
        norm = rank.accelerator.clip_grad_norm_(rank.model.parameters(), 1.5, norm_type)
    assert norm == torch.nn.utils.clip_grad_norm_([by_torch], 1.5, norm_type)
    assert torch.equal(rank.model.weight.grad, by_torch.grad)


def test_many_skipped_steps_in_a_row_end_the_training():
    rank = OneRank("skip")
    with rank.checked():
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            rank.step(math.nan)
        with pytest.raises(NonFiniteGradientError, match=r"step 11: .*The 10 steps before it"):
            rank.step(math.nan)


@pytest.mark.parametrize(("on_nan", "scaler"), [("off", None), ("raise", object())])
def test_where_it_is_off_or_a_scaler_is_at_work_nothing_is_judged(on_nan, scaler):
    rank = OneRank(on_nan, scaler=scaler)
    with rank.checked():
        assert math.isnan(rank.step(math.nan))
    assert rank.model.weight.isnan().all()


def test_out_of_memory_elsewhere_says_where():
    rank = OneRank()
    with pytest.raises(MemoryError, match="in step 1, outside forward and backward passes"), rank.checked():
        raise MemoryError
    rank.model.eval()
    told = r"(?s)in a batch of the evaluation of step 1 .*per_device_eval_batch_size"
    with pytest.raises(MemoryError, match=told), rank.checked():
        rank.compute_loss(rank.model, TooLarge(ids=torch.ones(5, 9, dtype=torch.int64), mask=torch.ones(5, 3)))


class TooLarge(dict):
    def __getitem__(self, key):
        raise MemoryError


@contextmanager
def two_ranks(**options):
    """Calls of `get_batch_samples` for one batch, on two ranks whose checks have one store."""
    store, config, draws = HashStore(), MultiGPUConfig(timeout_s=0.05, **options), []
    with ExitStack() as stack:
        for rank in range(2):
            trainer, manager = FakeTrainer(), manager_of(store, rank, 2, config)
            trainer.state.global_step = 12
            trainer.get_batch_samples = lambda batches, *_: next(batches, None)
            lead = Lead(manager, HeartbeatPage(None, rank))
            check = StepCheck(trainer, manager, SimpleNamespace(has_one_order=False), lead)
            stack.enter_context(Loop(trainer, [check]).steering())
            draws.append(lambda batches, trainer=trainer: trainer.get_batch_samples(batches, 1, "cpu"))
        yield draws


def test_ranks_with_as_many_batches_pass_to_the_next_epoch():
    with two_ranks() as draws:
        for _ in range(2):
            batches = iter(range(2)), iter(range(2))
            drawn = [[draw(mine) for _ in range(3)] for draw, mine in zip(draws, batches, strict=True)]
            assert drawn == [[0, 1, None]] * 2


@pytest.mark.parametrize(("of_rank_0", "of_rank_1"), [(1, 2), (2, 1)])
def test_rank_that_has_no_more_batches_while_rank_0_has_or_the_other_way_round_is_named(of_rank_0, of_rank_1):
    less, more = (0, 1) if of_rank_0 < of_rank_1 else (1, 0)
    with two_ranks() as (first, second):
        mine, its = iter(range(of_rank_0)), iter(range(of_rank_1))
        assert [first(mine), first(mine)] == [0, 1 if of_rank_0 > 1 else None]
        assert second(its) == 0
        with pytest.raises(DivergenceError, match=f"rank {less} has no more batches in step 13, but rank {more} has"):
            second(its)


def test_rank_that_waits_for_rank_0s_batch_waits_no_longer_than_it_may_or_not_where_ranks_step_independently():
    wait = "rank 1 waited 0.05 seconds for rank 0 to reach its next batch after step 12"
    with two_ranks() as (_, second), pytest.raises(RankTimeoutError, match=wait):
        second(iter(range(2)))
    with two_ranks(strategy="local_sgd") as (_, second):
        assert second(iter(range(2))) == 0


def test_micro_batch_without_effect_adds_nothing_beside_the_model_either():
    model, beside = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1))
    parameters = [*model.parameters(), beside]
    with _without_gradient(model, torch.optim.SGD(parameters, 0.1)):
        (model(torch.ones(1)) * beside * math.nan).sum().backward()
    assert [float(p.grad.sum()) for p in parameters] == [0.0, 0.0, 0.0]
    # Later passes count again.
    (model(torch.ones(1)) * beside).sum().backward()
    assert float(beside.grad) != 0.0
