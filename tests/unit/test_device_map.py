"""A device map that was written for one GPU, on a rank whose GPU is another one."""

import pytest

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.hooks.unsloth_patches import Placement, local_device_map

HERE = {"": 1}
AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential", "unsloth", "cuda", {"": "auto"})
ONE_CARD = (0, "0", "cuda:0", {"": 0}, {"": "cuda:0"}, {"model": 0, "lm_head": 0})
OF_THE_RANK = (1, "cuda:1", {"": "cuda:1"})  # Of a script that reads LOCAL_RANK.
OFF_CARD = ("cpu", {"": "cpu"}, {"": "meta"}, {"model": "cpu", "lm_head": "disk"})


def test_map_of_one_card_means_the_ranks_own():
    for device_map in (*AUTOMATIC, *ONE_CARD, *OF_THE_RANK):
        assert local_device_map(device_map, "cuda", 1) == HERE, device_map
    for device_map in OFF_CARD:
        assert local_device_map(device_map, "cuda", 1) == device_map
    for card in (0, "cuda"):  # Parts that are kept off the card stay there.
        parts = local_device_map({"model": card, "a": "cpu", "b": "disk"}, "cuda", 1)
        assert parts == {"model": 1, "a": "cpu", "b": "disk"}


@pytest.mark.parametrize(
    "device_map",
    [
        {"model.layers.0": 0, "model.layers.1": 1},
        {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1", "lm_head": "cpu"},
        {"": 2},
        "cuda:3",
    ],
)
def test_map_of_other_cards_is_an_error(device_map):
    with pytest.raises(ConfigError) as error:
        local_device_map(device_map, "cuda", 1)
    assert f"device_map={device_map!r}" in str(error.value)
    assert "Hint: Leave device_map out." in str(error.value)
    if isinstance(device_map, dict) and len(device_map) > 1:
        assert "shard='on' divides it" in str(error.value)


def test_map_by_which_a_model_would_be_split_is_told(caplog):
    def told(device_map, rank=0):
        patch = Placement("cuda", 1, rank, num_ranks=2).patches()[0]
        caplog.clear()
        assert patch.wrap(lambda **kwargs: kwargs, device_map=device_map) == {"device_map": HERE}
        return f"device_map={device_map!r} does not split" in caplog.text and "shard='auto'" in caplog.text

    assert all(told(name) for name in ("auto", "balanced", "balanced_low_0", "sequential", "unsloth"))
    assert not any(told(one_card) for one_card in ("cuda", 0, {"": 0}, {"": "cuda:1"}))
    assert not told("auto", rank=1)


@pytest.mark.parametrize("device_map", ["balanced", {"model.layers.0": 0, "model.layers.1": "cuda:3"}])
def test_map_that_splits_a_model_leaves_that_to_shards(device_map, caplog):
    caplog.set_level("INFO", logger="unsloth_multigpu")
    patch = Placement("cuda", 1, num_ranks=4, shards=True).patches()[0]
    assert patch.wrap(lambda **kwargs: kwargs, device_map=device_map) == {"device_map": HERE}
    assert "FSDP2 divides each layer between the ranks" in caplog.text
    with pytest.raises(ConfigError):
        patch.wrap(lambda **kwargs: kwargs, device_map={"model.layers.0": 0, "lm_head": "cpu", "model.layers.1": 3})
