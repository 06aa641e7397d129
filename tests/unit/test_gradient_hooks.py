"""Which hooks on gradients give the same training where a rank has a part of a step."""

import functools

import pytest
import torch
from torch import nn

from unsloth_multigpu.step.gradient_hooks import misfit_of_hooks

MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
PROJECTION = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))


def note(notes, gradient):
    notes.append(float(gradient.norm()))


LINEAR = {
    "mask": lambda g: g * MASK.to(g.dtype),
    "projection": lambda g: PROJECTION.to(g.dtype) @ g,
    "scale": lambda g: 3 * g,
    "note": functools.partial(note, []),
    "zero": torch.zeros_like,
}
OTHER = {
    "clamp": lambda g: g.clamp(-1, 1),
    "large clamp": lambda g: g.clamp(-1e3, 1e3),
    "norm": lambda g: g / g.norm(),
    "positive part": torch.relu,
    "sign": torch.sign,
    "noise": lambda g: g + torch.randn_like(g),
    "offset": lambda g: g + 1,
    "not a number": lambda g: g * torch.nan,
}


def hooked(hook, dtype=torch.float32):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).to(dtype)
    model[1].weight.register_hook(hook)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_hook_may_stay(name, dtype):
    assert misfit_of_hooks(hooked(LINEAR[name], dtype)) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OTHER)
def test_other_hook_is_named_with_its_parameter(name, dtype):
    own = functools.wraps(note)(lambda g: OTHER[name](g))
    assert misfit_of_hooks(hooked(own, dtype)) == "note, a hook on the gradient of 1.weight, is not linear"


def test_hook_that_needs_a_forward_pass_is_said_not_to_be_tried():
    class Masked:
        mask = None

        def hook(self, gradient):
            return gradient * self.mask

    found = misfit_of_hooks(hooked(Masked().hook))
    assert found.endswith(
        "Masked.hook, a hook on the gradient of 1.weight, could not be tried (TypeError: "
        "unsupported operand type(s) for *: 'Tensor' and 'NoneType')"
    )


def test_hook_of_16_bits_is_tried_within_its_range():
    assert misfit_of_hooks(hooked(lambda g: g * 0.5, torch.float16)) == ""
    assert "is not linear" in misfit_of_hooks(hooked(lambda g: g.clamp(-1, 1), torch.float16))


def test_hook_on_what_is_accumulated_is_not_called():
    model, calls = nn.Linear(3, 3), []
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    assert "a hook on weight reads the accumulated gradient" in misfit_of_hooks(model)
    assert calls == []


def test_generators_frozen_parameters_and_hooks_of_libraries_are_left_alone():
    model = hooked(lambda g: g + torch.randn_like(g))
    before = torch.get_rng_state()
    assert misfit_of_hooks(model)
    assert torch.equal(torch.get_rng_state(), before)
    model[1].weight.requires_grad_(False)
    assert misfit_of_hooks(model) == ""

    def of_library(gradient):
        return torch.sign(gradient)

    assert misfit_of_hooks(hooked(of_library))
    of_library.__module__ = "peft.tuners"
    assert misfit_of_hooks(hooked(of_library)) == ""
