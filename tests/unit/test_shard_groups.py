"""How accelerate's FSDP2 divides a model: no group contains another's weights, and none is in two."""

import pytest
from torch import nn

from unsloth_multigpu.errors import SetupError
from unsloth_multigpu.shard.groups import check_shared, layers_of


class Layer(nn.Linear):
    pass


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)


class Model(nn.Module):
    """As transformers' are: embeddings inside of a class that is not split, layers and a head."""

    _no_split_modules = ("Embeddings", "Layer", "LayerOfAnother")

    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)

    def get_input_embeddings(self):
        return self.embeddings.words

    def get_output_embeddings(self):
        return self.head


def test_layers_are_those_that_the_model_has_without_its_ends():
    assert layers_of(Model()) == ["Layer"]
    assert layers_of(nn.Linear(2, 2)) == []


def test_embeddings_and_head_may_share_their_weight():
    model = Model()
    model.head.weight = model.embeddings.words.weight
    check_shared(model)


def test_model_that_knows_no_embeddings_has_none():
    class Convolutions(Model):
        def get_input_embeddings(self):
            raise NotImplementedError

    check_shared(Convolutions())


def test_weight_that_a_third_module_uses_is_refused():
    model = Model()
    model.of_encoder = nn.Embedding(5, 4)
    model.of_encoder.weight = model.embeddings.words.weight
    with pytest.raises(SetupError, match=r"Model: of_encoder\.weight and the embeddings share one weight"):
        check_shared(model)


@pytest.mark.parametrize("is_trained", [True, False])
def test_weight_of_two_layers_is_refused_where_it_is_trained(is_trained):
    model = Model()
    one, other = model.layers
    other.weight = one.weight
    one.weight.requires_grad_(is_trained)
    if not is_trained:
        check_shared(model)
        return
    with pytest.raises(SetupError, match=r"Model: layers\.0\.weight and layers\.1\.weight share one weight"):
        check_shared(model)
