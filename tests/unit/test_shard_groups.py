"""How a model is divided for accelerate's FSDP2: no group contains another's weights, and none is in two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.shard.groups import ends_of, grouped, layers_of, users_apart


class Layer(nn.Linear):
    pass


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)


class Model(nn.Module):
    """As transformers' are: embeddings inside of a class that is not split, layers and a head."""

    _no_split_modules = ("Embeddings", "Layer", "LayerOfAnother")

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def plugin(layers: list[str] | None = None) -> Any:
    return SimpleNamespace(transformer_cls_names_to_wrap=layers)


def test_layers_are_those_that_the_model_has_without_its_ends() -> None:
    assert layers_of(Model()) == ["Layer"]
    assert layers_of(nn.Linear(2, 2)) == []


def test_decoder_is_left_as_it_is() -> None:
    model, told = Model(), plugin()
    model.head.weight = model.embeddings.words.weight
    before = dict(vars(model))
    with grouped(model, told):
        assert vars(model) == before
        assert ends_of(model) == (model.embeddings.words, model.head)
    assert told.transformer_cls_names_to_wrap == ["Layer"]


def test_layers_that_the_script_names_stay() -> None:
    told = plugin(["Linear"])
    with grouped(Model(), told):
        pass
    assert told.transformer_cls_names_to_wrap == ["Linear"]


def test_ends_that_share_a_weight_with_the_rest_are_one_group_with_it() -> None:
    model = Model()
    model.of_encoder = nn.Embedding(5, 4)
    model.of_encoder.weight = model.embeddings.words.weight
    assert users_apart(model, ["Layer"], ends_of(model)) == [("embeddings.words.weight", "of_encoder.weight")]
    with grouped(model, plugin()):
        assert ends_of(model) == (None, None)
        assert users_apart(model, ["Layer"], ends_of(model)) == []
    assert ends_of(model) == (model.embeddings.words, model.head)
    assert "get_input_embeddings" not in vars(model)


def test_model_that_knows_no_embeddings_has_none() -> None:
    class Convolutions(Model):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    model = Convolutions()
    with grouped(model, plugin()):
        assert model.get_input_embeddings() is None
        assert ends_of(model) == (None, model.head)
    with pytest.raises(NotImplementedError):
        model.get_input_embeddings()


@pytest.mark.parametrize("is_trained", [True, False])
def test_weight_of_two_layers_is_refused_where_it_is_trained(is_trained: bool) -> None:
    model = Model()
    one, other = model.layers
    other.weight = one.weight
    assert isinstance(one.weight, nn.Parameter)
    one.weight.requires_grad_(is_trained)
    if not is_trained:
        with grouped(model, plugin()):
            return
    with (
        pytest.raises(SetupError, match=r"Model: layers\.0\.weight and layers\.1\.weight are one weight"),
        grouped(model, plugin()),
    ):
        pass
    assert "get_input_embeddings" not in vars(model)
