"""Which models can share a sequence."""

from types import SimpleNamespace

import pytest
from torch import nn

from tests.helpers.refused import refused
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.step.sequence import layers_of


class Model(nn.Module):
    def __init__(self, layers, num_heads=4):
        super().__init__()
        self.layers = layers
        self.config = SimpleNamespace(_attn_implementation="sdpa", num_attention_heads=num_heads)

    def get_decoder(self):
        return self


class Fast(nn.Linear):
    def forward(self, hidden):
        return hidden


Fast.forward.__module__ = "unsloth.models.llama"


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (nn.Linear(1, 1), "Linear is no model of transformers with decoder layers"),
        (Model(nn.ModuleList([Fast(1, 1)])), "Unsloth computes attention by code of its own"),
        (Model(nn.ModuleList([nn.Linear(1, 1)]), num_heads=3), "sequence_parallel=2 does not divide 3 attention heads"),
    ],
)
def test_model_whose_attention_is_not_shared_is_refused(model, what):
    layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert layers_of(Model(layers), 2) == list(layers)
    with refused(SetupError, what):
        layers_of(model, 2)
