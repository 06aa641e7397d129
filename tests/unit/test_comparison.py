"""The comparison of a first step: sketches of gradients, and what a pass that does not count leaves as it was."""

import copy
import dataclasses
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch

from unsloth_multigpu.step.comparison import (
    NUM_PROJECTIONS,
    Comparison,
    Difference,
    difference,
    last_bits_changed,
    mean_of,
    names_of,
    sketch,
    sum_dtype,
)
from unsloth_multigpu.step.snapshot import KeptObjects, kept_training_state

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def model_with(gradients=None, seed=0, size=40):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(size, 30), torch.nn.Linear(30, 5))
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) if gradients is None else gradients[i]
    return model


def gradients_of(model):
    return [p.grad.clone() for p in model.parameters()]


def found(one, other):
    return difference([sketch(one)], [sketch(other)], names_of(one))


def test_equal_gradients_do_not_differ():
    model = model_with()
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients_of(model)))
    same = found(model, model_with(gradients_of(model)))
    assert (same.off, same.worst_off) == (0.0, 0.0)
    assert same.norm == pytest.approx(norm, rel=1e-6)
    assert len(sketch(model)) == len(NAMES) * (1 + NUM_PROJECTIONS)


def test_difference_is_estimated_and_its_parameter_named():
    """Of 200 pairs with the same norms, by which alone nothing shows."""
    sizes = []
    for seed in range(200):
        model = model_with(seed=seed, size=8)
        turned = gradients_of(model)
        turned[2] = turned[2].flip(0)
        true = float((turned[2] - model[1].weight.grad).norm()) / found(model, model).norm
        off = found(model, model_with(turned, size=8))
        assert off.worst == "1.weight"
        sizes.append(off.off / true)
    assert 0.85 < sum(sizes) / len(sizes) < 1.05
    assert min(sizes) > 0.05


def test_small_parameter_that_is_wrong_is_found_and_one_of_rounding_is_not():
    model = model_with()
    model[1].bias.grad *= 1e-4
    *others, small = gradients_of(model)
    wrong = found(model, model_with([*others, -small]))
    assert wrong.off < 1e-4 < wrong.worst_off
    assert not wrong.is_within(1e-5)
    assert found(model, model_with([*others, small + 1e-8 * torch.randn(5)])).is_within(1e-5)


def test_mean_of_sketches_is_the_sketch_of_the_mean():
    one, other = model_with(seed=1), model_with(seed=2)
    mean = model_with([(a + b) / 2 for a, b in zip(gradients_of(one), gradients_of(other), strict=True)])
    expected, mine = mean_of([sketch(mean)] * 2), mean_of([sketch(one), sketch(other)])
    assert mine == pytest.approx(expected, rel=1e-4, abs=1e-5)


def gradient_of(model, loss):
    model.zero_grad()
    loss(model(torch.linspace(-1, 1, 640).reshape(64, 10))).backward()
    return sketch(model)


def model_of():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
    with torch.no_grad():
        model[0].bias[:5] = torch.tensor([0.0, -0.0, 1e30, -1e-30, 1.0])
    return model


def test_last_bits_are_changed_and_put_back():
    model = model_of().append(torch.nn.Linear(3, 3).to(torch.bfloat16))
    before = [p.clone() for p in model.parameters()]
    with last_bits_changed(model):
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert bool((parameter != old if old.dtype == torch.float32 else parameter == old).all())
            assert torch.allclose(parameter, old, rtol=2e-7, atol=2e-45)
    for parameter, old in zip(model.parameters(), before, strict=True):
        bits = torch.int32 if old.dtype == torch.float32 else torch.int16
        assert torch.equal(parameter.data.view(bits), old.view(bits))


@pytest.mark.parametrize(
    ("loss", "least", "most"),
    [
        (lambda out: out.square().mean(), 0.0, 1e-6),
        # The sum is always 1, so what it adds to the gradient is rounding alone.
        (lambda out: out.square().mean() + 1e3 * out.softmax(-1).sum(), 1e-5, 1e-2),
    ],
)
def test_what_is_badly_conditioned_changes_more(loss, least, most):
    model = model_of()
    one = gradient_of(model, loss)
    with last_bits_changed(model):
        again = gradient_of(model, loss)
    assert least < difference([one], [again], names_of(model)).off < most


@pytest.mark.parametrize(
    ("properties", "dtype"),
    [({"has_fp64": False}, torch.float32), ({"has_fp64": True}, torch.float64), ({}, torch.float64)],
)
def test_sums_are_as_wide_as_the_device(monkeypatch, properties, dtype):
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert sum_dtype(torch.device("xpu", 0)) == dtype
    assert sum_dtype(torch.device("cpu")) == torch.float64


def test_difference_of_the_size_of_rounding_is_equal_and_its_bound_is_told():
    base = Comparison(1, 2, 1, 1, difference=Difference(1.0, 1.0, 6e-5, "bias", 0.05), bound=1e-5)
    assert not base.is_exact
    assert "the gradient differs by 6.0e-05" in str(base)
    assert base.values()["rounding"] is None
    explained = dataclasses.replace(base, rounding=3e-4)
    assert explained.is_exact
    assert str(explained).endswith("equal gradient, differs by 6.0e-05 (rounding changes it by 3.0e-04)")
    assert not dataclasses.replace(base, rounding=1e-6).is_exact
    assert not dataclasses.replace(explained, unproven="it draws").is_exact
    assert not dataclasses.replace(base, rounding=math.nan).is_exact
    lower = Comparison(1, 2, 1, 1, difference=Difference(1.0, 1.0, 2.6e-3), bound=5e-2)
    assert str(lower).endswith("equal gradient, differs by 2.6e-03 (rounding in this precision: up to 5e-02)")


HISTORY = []


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.register_buffer("mean", torch.zeros(2))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.mean += 1
        self.last = x
        HISTORY.append(self.num_calls)
        return self.layer(x)


class Trainer:
    """A script's own, with all that it may count by."""

    def __init__(self):
        self.model, self.optimizer = Model(), None
        self.args = SimpleNamespace(device=torch.device("cpu"))
        self.metrics = defaultdict(list, loss=[1.0])
        self.teacher = {"w": torch.ones(2)}
        self.generators = [random.Random(1), torch.Generator(), numpy.random.default_rng(0)]
        self.nested, self.logs = {"a": [{1}]}, []
        self.train_dataset = [1]
        self.loss = self.make_loss()

    def log(self, line):
        self.logs.append(line)

    def make_loss(self):
        count = 0

        def loss(x):
            nonlocal count
            count += 1
            loss.average = count
            return count

        return loss

    def compute(self):
        loss = self.model(torch.ones(3, 2)).sum() * self.loss(1)
        loss.backward()
        self.metrics["loss"].append(2.0)
        self.metrics["new"].append(3.0)
        self.teacher["w"].mul_(2)
        self.nested["a"][0].add(2)
        self.nested["b"] = self
        self.fresh = 1
        self.log({})
        self.generators[1] = None
        random.random(), numpy.random.rand(), torch.rand(1)
        self.train_dataset.append(2)


def fields(thing, *left_out):
    return {name: value for name, value in vars(thing).items() if name not in left_out and not name.startswith("_")}


def state_of(trainer):
    first, _, last = trainer.generators
    return repr(
        [
            fields(trainer, "model", "loss", "train_dataset", "args"),
            dict(trainer.model.named_buffers()),
            fields(trainer.model),
            [p.grad for p in trainer.model.parameters()],
            [random.getstate(), numpy.random.get_state(), torch.get_rng_state().sum(), first.getstate(), last.random()],
            [HISTORY, trainer.loss.__closure__[0].cell_contents, vars(trainer.loss)],
        ]
    )


def test_a_pass_leaves_no_trace():
    trainer = Trainer()
    trainer.model(torch.ones(3, 2)).sum().backward()
    with KeptObjects(trainer):
        before = state_of(trainer)
        versions = [b._version for b in trainer.model.buffers()]
    for _ in range(2):
        with kept_training_state(trainer):
            trainer.compute()
        with KeptObjects(trainer):
            assert state_of(trainer) == before
    assert trainer.train_dataset == [1, 2, 2]  # Data are no state.
    with KeptObjects(trainer.model):
        pass
    assert versions[-1] < [b._version for b in trainer.model.buffers()][-1]
    again = [b._version for b in trainer.model.buffers()]
    with KeptObjects(trainer.model):
        pass
    assert [b._version for b in trainer.model.buffers()] == again  # What is not written does not count as changed.


@pytest.mark.parametrize(
    "held",
    [
        *(Counter(b=3, a=1), OrderedDict(b=3, a=1), defaultdict(int, b=3, a=1), {"b": 3, "a": 1}),
        *(["b", "a"], deque(["b", "a"]), {2, 1}),
    ],
    ids=lambda held: type(held).__name__,
)
def test_containers_of_the_script_are_as_before(held):
    before = copy.copy(held)
    with KeptObjects(held):
        held.clear()
    assert held == before
    assert list(held) == list(before)


def test_arrays_of_the_script_are_as_before():
    counts, data, number = numpy.zeros(3), numpy.zeros(3), numpy.float32(1)
    data.flags.writeable = False
    frozen, resized = numpy.zeros(3), numpy.zeros(3)
    with KeptObjects([frozen, resized, counts, data, number]):
        counts[1] += 1
        frozen.setflags(write=False)
        resized.resize(4, refcheck=False)
    assert not counts.any()
