"""What of ours stands on a Trainer while it trains, in which order, and how often it is called: as it is written down.

The order decides what is computed: who sends gradients must see them after who has weighed them. A change of
`onion.json` is a change of behaviour; it is read before it is accepted. With UPDATE_ONION=1 this test writes it.
"""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.notebook import NotebookRun
from tests.helpers.run import BARE, finish, start

SCRIPTS = Path(__file__).parent / "scripts"
FROZEN = Path(__file__).parent / "onion.json"
ALL = {"resume": "auto", "on_nan": "skip", "verify_every": 1}
RUNS = {
    "one process": (1, [{}, {"resume": "auto"}, {"on_nan": "skip"}, {"balance": "tokens"}]),
    "two ranks": (2, [ALL]),
    "two ranks that step by themselves": (2, [{"strategy": "local_sgd"}]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("onion")
    seen = {}
    for number, (name, (num_ranks, options)) in enumerate(RUNS.items()):
        arguments = ["--num-gpus", num_ranks, "--out", folder / f"{number}.json", *map(json.dumps, options)]
        own = folder / str(number)
        own.mkdir()
        run = finish(start([SCRIPTS / "onion.py", *arguments], own, BARE))
        assert run.code == 0, run.err
        trainings = json.loads((folder / f"{number}.json").read_text())
        seen |= {f"{name} {json.dumps(o)}": training for o, training in zip(options, trainings, strict=True)}
    own = folder / "notebook"
    own.mkdir()
    with NotebookRun(own, BARE) as notebook:
        line = "import unsloth_multigpu as ump\nump.enable_multi_gpu(num_gpus=2)"
        assert not notebook.run(line).error
        cell = f"import json, sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nfrom onion_look import train\n"
        # Rank 0 alone adds numbers to the log.
        write = "if ump.get_multi_gpu_status().rank == 0:\n    open('facts.json', 'w').write(json.dumps(facts))\n"
        result = notebook.run(cell + "facts = train('checkpoints')\n" + write)
        assert not result.error, result.value
    seen["notebook {}"] = json.loads((own / "facts.json").read_text())
    if os.environ.get("UPDATE_ONION"):
        FROZEN.write_text(json.dumps(seen, indent=1) + "\n")
    return seen


def test_our_functions_stand_where_they_stood(found):
    assert found == json.loads(FROZEN.read_text())


def test_nothing_of_ours_is_left_behind_a_training(found):
    assert {name: training["left"] for name, training in found.items() if training["left"]} == {}
