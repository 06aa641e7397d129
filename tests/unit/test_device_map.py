"""A device map that was written for one GPU, on a rank whose GPU is another one."""

import json
from types import SimpleNamespace

import pytest
import torch

from unsloth_multigpu.errors import ConfigError, SetupError
from unsloth_multigpu.hooks.unsloth_patches import Placement, local_device_map
from unsloth_multigpu.shard.stored import least_bytes

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
    def told(device_map, *, warns=True):
        (patch,) = (p for p in Placement("cuda", 1, warns=warns).patches() if f":{target}." in p.target)
        caplog.clear()
        assert patch.wrap(lambda **kwargs: kwargs, device_map=device_map) == {"device_map": HERE}
        return f"device_map={device_map!r} does not split" in caplog.text and "shard='auto'" in caplog.text

    assert all(told(name) for name in ("auto", "balanced", "balanced_low_0", "sequential", "unsloth"))
    assert not any(told(one_card) for one_card in ("cuda", 0, {"": 0}, {"": "cuda:1"}))
    assert not told("auto", warns=False)


@pytest.mark.parametrize("device_map", ["balanced", {"model.layers.0": 0, "model.layers.1": "cuda:3"}])
def test_map_that_splits_a_model_leaves_that_to_shards(device_map, caplog):
    caplog.set_level("INFO", logger="unsloth_multigpu")
    patch = Placement("cuda", 1, warns=False, num_ranks=4, shards=True).patches()[0]
    assert patch.wrap(lambda **kwargs: kwargs, device_map=device_map) == {"device_map": HERE}
    assert "FSDP2 divides each layer between the ranks" in caplog.text
    with pytest.raises(ConfigError):
        patch.wrap(lambda **kwargs: kwargs, device_map={"model.layers.0": 0, "lm_head": "cpu", "model.layers.1": 3})


def stored(folder, *, packed=False):
    """A model of 3 GiB in bfloat16, of which there are the small files."""
    folder.mkdir()
    config = {"dtype": "bfloat16", **({"quantization_config": {"load_in_4bit": True}} if packed else {})}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 3 * 2**30}}))
    return folder


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1.0),
        ({"dtype": "auto"}, 1.0),
        ({"dtype": torch.float32}, 2.0),
        ({"torch_dtype": "float32"}, 2.0),
        ({"load_in_4bit": True, "dtype": torch.bfloat16}, 0.25),
        ({"quantization_config": SimpleNamespace(load_in_8bit=True)}, 0.5),
        ({"subfolder": "other"}, 0.0),
    ],
)
def test_memory_of_weights_is_known_from_files(tmp_path, options, share):
    assert least_bytes(stored(tmp_path / "model"), options) == share * 3 * 2**30
    assert least_bytes(stored(tmp_path / "packed", packed=True), {"load_in_4bit": True}) == 3 * 2**30
    assert least_bytes("nobody/has-it-here", options) == 0
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text('{"torch_dtype": "float16"}')
    (tmp_path / "one" / "model.safetensors").write_bytes(bytes(100))
    assert least_bytes(str(tmp_path / "one"), {}) == 100


@pytest.mark.parametrize("device_map", ["balanced", "auto", "sequential", {"": 0}, {"model.a": 0, "model.b": 1}])
def test_weights_that_one_card_does_not_hold_are_refused_before_they_are_loaded(tmp_path, device_map, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (0, 2 * 2**30))
    name = stored(tmp_path / "model")

    def load(model=name, device_map=device_map, **options):
        given = {"num_ranks": 2, "warns": False, **options}
        (patch,) = (p for p in Placement("cuda", 1, **given).patches() if ":PreTrainedModel." in p.target)
        return patch.wrap(lambda *args, **kwargs: kwargs["device_map"], object, model, device_map=device_map)

    with pytest.raises(SetupError) as error:
        load()
    assert f"device_map={device_map!r}: the weights of {name} take 3.0 GiB or more, and each rank has" in str(
        error.value
    )
    assert "one card, of 2.0 GiB" in str(error.value)
    assert "enable_multi_gpu(shard='on') divides the model between the 2 ranks" in str(error.value)
    assert load(shards=True) == HERE
    assert load(device_map="cpu") == "cpu"
    if "model.a" not in device_map:  # Which is another error.
        assert load(num_ranks=1) == load("nobody/has-it-here") == HERE
