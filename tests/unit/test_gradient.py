"""Gradients that are no finite numbers, and the check of each step that finds them, without ranks."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.trainer import FakeTrainer
from unsloth_multigpu.errors import NonFiniteGradientError
from unsloth_multigpu.strategy import read_strategy
from unsloth_multigpu.train.check import (
    MAX_SKIPPED_IN_A_ROW,
    StepCheck,
    describe,
    not_finite_losses,
    not_finite_parameters,
    total_norm,
)
from unsloth_multigpu.train.loop import Loop


@pytest.mark.parametrize(
    ("losses", "parameters", "rest"),
    [
        ({0: [], 1: [(0, "nan")]}, (), "loss of rank 1, micro-batch 0, was nan"),
        (
            {0: [(2, "inf")], 1: [(0, "nan")]},
            (),
            "loss of rank 0, micro-batch 2, was inf; loss of rank 1, micro-batch 0, was nan",
        ),
        ({0: [], 1: []}, ("a.weight", "b"), "all losses were finite, not so the gradient of a.weight, b"),
        ({0: [], 1: []}, tuple("abcde"), "all losses were finite, not so the gradient of a, b, c and 2 more"),
        ({1: []}, (), "the losses of rank 1 were finite"),
    ],
)
def test_description_names_ranks_or_parameters(losses, parameters, rest):
    assert describe(12, math.nan, losses, parameters) == f"step 12: gradient norm is nan; {rest}"


def test_losses_and_gradients_that_are_not_finite_are_found():
    losses = [torch.tensor(x) for x in (1.0, math.nan, -math.inf)]
    assert not_finite_losses(losses) == [(1, "nan"), (2, "-inf")]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(3, 2, sparse=True))
    model[1](torch.tensor([1, 1, 2])).sum().backward()
    model[0](torch.ones(1, 2)).sum().backward()
    assert float(total_norm(model.parameters())) == pytest.approx(math.sqrt(6 + 2 * 4 + 2 * 1))
    assert not_finite_parameters(model) == []
    model[0].bias.grad[1] = math.nan
    assert not_finite_parameters(model) == ["0.bias"]
    assert math.isnan(total_norm(model.parameters()))


class OneRank(FakeTrainer):
    """A trainer of one linear layer, and the loop's calls of one step."""

    def __init__(self, on_nan="raise", strategy="ddp", *, scaler=None, clips=True):
        super().__init__(torch.nn.Linear(2, 1, bias=False))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.accelerator.scaler = scaler
        self._clips = clips
        self.gathered = []
        self.manager = SimpleNamespace(
            config=SimpleNamespace(
                on_nan=on_nan,
                strategy=read_strategy("strategy", strategy),
                is_synchronous=True,
                timeout_s=0.05,
                shard_offload=False,
            ),
            identity=SimpleNamespace(rank=0, world_size=1),
            gather_texts=lambda text: self.gathered.append(text) or [text],
        )
        self.check = StepCheck(self, self.manager)

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


@pytest.mark.parametrize("clips", [True, False])
def test_skipped_step_leaves_weights_and_optimizer_alone(clips, caplog):
    caplog.set_level(logging.WARNING, "unsloth_multigpu")
    skips, other = OneRank("skip", clips=clips), OneRank("skip", clips=clips)
    other.model.load_state_dict(skips.model.state_dict())
    with skips.checked(), other.checked():
        for _ in range(MAX_SKIPPED_IN_A_ROW + 2):  # Never many in a row.
            skips.step(1.0)
            norm = skips.step(math.nan)
            other.step(1.0)
    assert set(skips.gathered) == {'[[0, "nan"]]'}
    assert not clips or not math.isfinite(norm)
    assert torch.equal(skips.model.weight, other.model.weight)
    assert int(skips.optimizer.state[skips.model.weight]["step"]) == MAX_SKIPPED_IN_A_ROW + 2
    warnings = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(warnings) == MAX_SKIPPED_IN_A_ROW + 2
    assert warnings[-1] == (
        "step 24: gradient norm is nan; loss of rank 0, micro-batch 0, was nan: left out on all ranks (12 so far)"
    )


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


def test_finite_gradient_whose_squares_overflow_is_clipped_to_nothing():
    rank = OneRank()
    before = rank.model.weight.detach().clone()
    with rank.checked():
        assert rank.step(1e30) == math.inf
    assert torch.equal(rank.model.weight, before)


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
    with (
        pytest.raises(MemoryError, match=r"(?s)in a batch of the evaluation of step 1 .*per_device_eval_batch_size"),
        rank.checked(),
    ):
        rank.compute_loss(rank.model, _raising(MemoryError()))


def _raising(error):
    class Inputs(dict):
        def __getitem__(self, key):
            raise error

    return Inputs(ids=torch.ones(5, 9, dtype=torch.int64), mask=torch.ones(5, 3))
