"""4-bit weights of which a rank has its rows."""

import copy
from types import SimpleNamespace

import pytest
import torch

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.shard.packed import Withheld, check_parts, give_back, in_parts, keep_rows

CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """Has what bitsandbytes' layer has, around packed bytes."""

    def __init__(self, num_bytes):
        super().__init__()
        self.quant_state = SimpleNamespace(absmax=torch.ones(2), dtype=torch.bfloat16, moved_to=None)
        self.quant_state.to = lambda device: setattr(self.quant_state, "moved_to", device)
        packed = torch.nn.Parameter(torch.arange(num_bytes, dtype=torch.uint8)[:, None], requires_grad=False)
        packed.quant_state, packed.module, packed.quant_storage = self.quant_state, self, torch.uint8
        self.weight = packed


def test_nothing_computes_with_missing_rows_until_they_are_given_back():
    layer = Layer(16)
    state = layer.quant_state
    keep_rows(layer.weight, torch.bfloat16, CPU, 0, 2)
    assert state.moved_to == CPU
    for held in (layer.weight.quant_state, copy.deepcopy(layer.quant_state)):
        assert isinstance(held, Withheld)
        assert held.dtype == torch.bfloat16
        with pytest.raises(SetupError, match="a shard of the 4-bit weights"):
            _ = held.absmax
    layer.quant_state.dtype = torch.float16  # As Unsloth sets it.
    assert state.dtype == torch.float16
    assert in_parts(torch.nn.Sequential(layer)) == [layer]
    give_back([layer])
    assert layer.weight.quant_state is layer.quant_state is state
    assert in_parts(layer) == []


def test_weight_that_was_not_divided_so_is_refused():
    layer = Layer(16)
    keep_rows(layer.weight, torch.bfloat16, CPU, 0, 2)
    with pytest.raises(SetupError, match="has sharded them differently"):
        check_parts([layer], 0, 2)
