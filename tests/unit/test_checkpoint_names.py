"""A training does not go on from a checkpoint of which trained weights were not found."""

from types import SimpleNamespace

import pytest
from torch import nn

from unsloth_multigpu.checkpoint.resume import Resume, lost_weights
from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.wire.context import RunContext


def loads(model, *missing):
    """What transformers is told, after a load that has not found some names."""
    told = []
    resume = Resume(SimpleNamespace(model=model), None, None, {}, 0, RunContext())
    resume.overrides()["_issue_warnings_after_load"](told.append, SimpleNamespace(missing_keys=missing))
    return told


def test_one_name_of_a_shared_weight_is_enough():
    model = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    model["head"].weight = model["embed"].weight
    assert lost_weights(model, ["embed.weight"]) == ([], 1)
    assert lost_weights(model, ["embed.weight", "head.weight"]) == (["embed.weight"], 1)


def test_training_does_not_go_on_without_its_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(SetupError, match=r"without 2 of 4 trained weights, such as 0\.weight"):
        loads(model, "0.weight", "0.bias")
    model[0].requires_grad_(False)
    assert len(loads(model, "0.weight", "0.bias")) == 1  # Frozen ones are those of the script.
    model._keys_to_ignore_on_save = ["1.bias"]
    assert len(loads(model, "1.bias")) == 1  # transformers does not write it, and ties it.
    assert len(loads(model)) == 1
