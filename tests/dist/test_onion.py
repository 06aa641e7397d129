"""What of ours stands on a Trainer while it trains, in which order, and how often it is called: as it is written down.

The order decides what is computed: who sends gradients must see them after who has weighed them. A change of
`onion.json` is a change of behaviour; it is read before it is accepted. With UPDATE_ONION=1 this test writes it.
"""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.run import BARE, run_well

SCRIPTS = Path(__file__).parent / "scripts"
FROZEN = Path(__file__).parent / "onion.json"
RUNS = {
    "one process": (1, [{}, {"resume": "auto"}]),
    "ranks": (2, [{"resume": "auto", "on_nan": "skip", "verify_every": 1}, {"strategy": "local_sgd:every_steps=2"}]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("onion")
    seen = {}
    for number, (name, (num_ranks, options)) in enumerate(RUNS.items()):
        own = folder / str(number)
        own.mkdir()
        arguments = [num_ranks, folder / f"{number}.json", *map(json.dumps, options)]
        run_well([SCRIPTS / "onion.py", *arguments], own, BARE)
        trainings = json.loads((folder / f"{number}.json").read_text())
        seen |= {f"{name} {json.dumps(o)}": training for o, training in zip(options, trainings, strict=True)}
    if os.environ.get("UPDATE_ONION"):
        FROZEN.write_text(json.dumps(seen, indent=1) + "\n")
    return seen


def test_our_functions_stand_where_they_stood(found):
    assert found == json.loads(FROZEN.read_text())
    assert all(len(t["seams"]) <= 14 and sum(map(len, t["seams"].values())) <= 25 for t in found.values())


def test_nothing_of_ours_is_left_behind_a_training(found):
    assert {name: training["left"] for name, training in found.items() if training["left"]} == {}
