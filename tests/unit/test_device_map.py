"""A device map that was written for one GPU, on a rank whose GPU is another one."""

import pytest

from unsloth_multigpu.errors import ConfigError
from unsloth_multigpu.hooks.unsloth_patches import Placement, local_device_map

HERE = {"": 1}


@pytest.mark.parametrize(
    ("device_map", "placed"),
    [
        # "Wherever the accelerator is".
        *((name, HERE) for name in ("auto", "balanced", "balanced_low_0", "sequential", "unsloth", "cuda")),
        # The one card of the script.
        (0, HERE),
        ("0", HERE),
        ("cuda:0", HERE),
        ({"": 0}, HERE),
        ({"": "cuda:0"}, HERE),
        ({"": "auto"}, HERE),
        # A script that reads LOCAL_RANK.
        (1, HERE),
        ("cuda:1", HERE),
        ({"": "cuda:1"}, HERE),
        ({"model": 0, "lm_head": 0}, HERE),
        # Parts that are kept off the card stay there.
        ({"model": 0, "lm_head": "cpu"}, {"model": 1, "lm_head": "cpu"}),
        ({"model": "cuda", "a": "cpu", "b": "disk"}, {"model": 1, "a": "cpu", "b": "disk"}),
        ("cpu", "cpu"),
        ({"": "cpu"}, {"": "cpu"}),
        ({"": "meta"}, {"": "meta"}),
        ({"model": "cpu", "lm_head": "disk"}, {"model": "cpu", "lm_head": "disk"}),
    ],
)
def test_map_of_one_card_means_the_ranks_own(device_map, placed):
    assert local_device_map(device_map, "cuda", 1) == placed


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


@pytest.mark.parametrize("target", ["FastLanguageModel", "FastModel", "PreTrainedModel"])
def test_map_by_which_a_model_would_be_split_is_told(target, caplog):
    def told(device_map, rank=0):
        (patch,) = (p for p in Placement("cuda", 1, rank, num_ranks=2).patches() if f":{target}." in p.target)
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
