"""How much rounding may change a gradient: the change of weights is undone, and shows what is badly conditioned."""

import dataclasses
import math

import pytest
import torch

from unsloth_multigpu.step.comparison import Comparison, Difference
from unsloth_multigpu.step.rounding import last_bits_changed
from unsloth_multigpu.step.sketch import difference, names_of, sketch


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


def test_difference_of_the_size_of_rounding_is_equal():
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


def test_bound_of_a_lower_precision_is_told():
    found = Comparison(1, 2, 1, 1, difference=Difference(1.0, 1.0, 2.6e-3), bound=5e-2)
    assert str(found).endswith("equal gradient, differs by 2.6e-03 (rounding in this precision: up to 5e-02)")
