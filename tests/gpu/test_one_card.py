"""Steps of `make gpu` for which one card is enough, and a device in host memory is, too. Needs a GPU."""

from __future__ import annotations

import math

import pytest

from tests.gpu import kit
from tests.gpu.card import IS_REHEARSAL, NEEDS_CARD, NEEDS_DRIVER
from tests.gpu.step import steps_of

pytestmark = [NEEDS_CARD, pytest.mark.slow]
STEPS = {s.name: s for s in steps_of("cpu" if IS_REHEARSAL else "cuda", is_tiny=IS_REHEARSAL)}
SMALL = ("fp16", "beyond_vocabulary", "out_of_memory", "recompiled", "waits")


def result_of(name, folder):
    rehearsed = ["--tiny", "--device", "cpu"] if IS_REHEARSAL else []
    outcome = kit.run_step(STEPS[name], kit.parse(["--out", str(folder / "r.json"), *rehearsed]), math.inf)
    assert outcome["problems"] == [], outcome["tail"]
    return outcome["result"]


def marks_of(name):
    """tests/gpu/test_device_training.py shows the same of these, on devices in host memory."""
    is_double = name in ("fp16", "out_of_memory")
    return [*([NEEDS_DRIVER] if STEPS[name].needs_driver else []), *([pytest.mark.thorough] if is_double else [])]


@NEEDS_DRIVER
@pytest.mark.parametrize("train", ["lora", "full"])
def test_two_ranks_on_one_card_train_as_one_process(tmp_path, train):
    result = result_of(f"shared_{train}", tmp_path)
    padding = {arm["name"]: arm["padding_share"]["median"] for arm in result["results"]}
    assert padding["ours"] < padding["one_process"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks_of(n)) for n in SMALL])
def test_step_shows_what_it_is_for(tmp_path, name):
    result_of(name, tmp_path)
