"""Sketches of gradients: what they tell apart, and what they take for rounding."""

import math

import pytest
import torch

from unsloth_multigpu.step.sketch import NUM_PROJECTIONS, difference, mean_of, names_of, sketch

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def model_with(gradients=None, seed=0, size=40):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(size, 30), torch.nn.Linear(30, 5))
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) if gradients is None else gradients[i].clone()
    return model


def gradients_of(model):
    return [p.grad for p in model.parameters()]


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
        turned = [g.clone() for g in gradients_of(model)]
        turned[2] = turned[2].flip(0)
        true = float((turned[2] - model[1].weight.grad).norm()) / found(model, model).norm
        off = found(model, model_with(turned, size=8))
        assert off.worst == "1.weight"
        sizes.append(off.off / true)
    assert 0.85 < sum(sizes) / len(sizes) < 1.05
    assert min(sizes) > 0.05


def test_small_parameter_that_is_wrong_is_found_and_one_of_rounding_is_not():
    model = model_with()
    gradients = [g.clone() for g in gradients_of(model)]
    gradients[3] = gradients[3] * 1e-4
    model[1].bias.grad = gradients[3].clone()
    gradients[3] = -gradients[3]
    wrong = found(model, model_with(gradients))
    assert wrong.off < 1e-4 < wrong.worst_off
    assert not wrong.is_within(1e-5)
    gradients[3] = model[1].bias.grad + 1e-8 * torch.randn(5)
    assert found(model, model_with(gradients)).is_within(1e-5)


def test_mean_of_sketches_is_the_sketch_of_the_mean():
    one, other = model_with(seed=1), model_with(seed=2)
    mean = model_with([(a + b) / 2 for a, b in zip(gradients_of(one), gradients_of(other), strict=True)])
    expected, mine = mean_of([sketch(mean)] * 2), mean_of([sketch(one), sketch(other)])
    assert mine == pytest.approx(expected, rel=1e-4, abs=1e-5)
