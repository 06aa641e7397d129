"""A checkpoint whose weights have other names than the model has for them is not resumed from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Trainer

from unsloth_multigpu.checkpoint.names import lost_weights, names_in
from unsloth_multigpu.checkpoint.resume import Resume
from unsloth_multigpu.errors import ResumeError
from unsloth_multigpu.wire.context import RunContext


def test_names_are_read_from_one_file_and_from_several(tmp_path: Path) -> None:
    assert names_in(tmp_path) is None
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert names_in(tmp_path) == {"a", "b"}
    index = {"metadata": {}, "weight_map": {"c": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names_in(tmp_path) == {"c"}


def test_one_name_of_a_shared_weight_is_enough() -> None:
    weights = [("embed", 1), ("head", 1), ("norm", 2)]
    assert lost_weights(weights, {"head", "norm"}) == []
    assert lost_weights(weights, {"norm"}) == ["embed"]


def resume_of(trainer: Any) -> Resume:
    return Resume(trainer, None, None, {}, 0, RunContext())  # type: ignore[arg-type]


class OwnLoader(SimpleNamespace):
    def _load_from_checkpoint(self) -> None:
        """That of a subclass, which knows its files."""


class TransformersLoader(OwnLoader):
    _load_from_checkpoint = Trainer._load_from_checkpoint


@pytest.mark.parametrize("saved", ["own names", "other names", "one frozen is missing"])
def test_training_does_not_go_on_without_its_weights(tmp_path: Path, saved: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = dict(model.state_dict())
    if saved == "other names":
        state = {f"hub.{name}": tensor for name, tensor in state.items()}
    elif saved == "one frozen is missing":
        model[1].requires_grad_(False)
        state.pop("1.weight")
    save_file(state, tmp_path / "model.safetensors")
    resume = resume_of(TransformersLoader(model=model))
    resume._check_weights()  # It does not resume.
    resume._folder = tmp_path
    if saved != "other names":
        resume._check_weights()
        return
    elsewhere = resume_of(OwnLoader(model=model))
    elsewhere._folder = tmp_path
    elsewhere._check_weights()
    with pytest.raises(ResumeError, match=r"loaded without 4 of 4 trained weights, 0\.weight say"):
        resume._check_weights()
