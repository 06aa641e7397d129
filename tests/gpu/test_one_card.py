"""Two ranks that share one card over gloo train as one process. Needs a GPU."""

from __future__ import annotations

import math

import pytest

from tests.gpu import kit
from tests.gpu.card import IS_REHEARSAL, needs_cards
from tests.gpu.step import steps_of

pytestmark = [needs_cards(1), pytest.mark.slow]
STEPS = {s.name: s for s in steps_of("cpu" if IS_REHEARSAL else "cuda", is_tiny=IS_REHEARSAL)}


@pytest.mark.parametrize("train", ["lora", "full"])
def test_two_ranks_on_one_card_train_as_one_process(tmp_path, train):
    options = kit.parse(["--out", str(tmp_path / "r.json"), *(["--tiny", "--device", "cpu"] if IS_REHEARSAL else [])])
    outcome = kit.run_step(STEPS[f"shared_{train}"], options, math.inf)
    assert outcome["problems"] == [], outcome["tail"]
    padding = {arm["name"]: arm["padding_share"]["median"] for arm in outcome["result"]["results"]}
    assert padding["ours"] < padding["one_process"]
