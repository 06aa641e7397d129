"""A training that was killed or stopped goes on to the weights that it would have had, on other numbers of ranks too.

One launch does most of it: its last configuration kills a rank, and in the second attempt all go on.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.outcome import largest_difference
from tests.helpers.run import PLAIN, run_well

SCRIPT = Path(__file__).parent / "scripts" / "resume.py"
pytestmark = pytest.mark.slow

OPTIONS = {"resume": "auto", "max_restarts": 1, "balance": "off"}
ELASTIC = {"random": False, "folder": "elastic", "args": {"num_train_epochs": 1, "save_strategy": "no"}}
ORDER = {"own_order": True, "dropout": 0.1, "args": {"dataloader_num_workers": 2, "save_total_limit": 2}}
# A pass has 10 steps.
STREAM = {"stream": True, "dropout": 0.1, "args": {"max_steps": 22, "save_strategy": "no"}}
KILLED = {"lora": True, "dropout": 0.1, "args": {"gradient_accumulation_steps": 2}}
BEST = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "max_steps": 4}
RUNS = {
    "elastic_2": {**ELASTIC, "pause": 4, "stop": 5},
    "order": {**ORDER, "pause": 14, "tear": "optimizer.pt"},
    "stream": {**STREAM, "pause": 13},
    "killed": {**KILLED, "kill": [1, 8]},
    "elastic_whole": {**ELASTIC, "folder": "elastic_whole"},
    "order_whole": ORDER,
    "stream_whole": STREAM,
    "killed_whole": KILLED,
    "best": {"args": {**BEST, "save_total_limit": 1}},
}


def train(folder, num_gpus, lines):
    configurations = [f"{name}={json.dumps(line)}" for name, line in lines.items()]
    run = run_well([SCRIPT, str(num_gpus), json.dumps(OPTIONS), *configurations], folder, PLAIN)
    return run.err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    return folder, train(folder, 2, RUNS)


def facts(folder, name, rank=0, attempt=1):
    return json.loads((folder / f"{name}_{rank}_{attempt}.json").read_text())


def difference(folder, name, other):
    return largest_difference(folder / f"{name}.safetensors", folder / f"{other}.safetensors")


@pytest.mark.parametrize(
    ("name", "checkpoint", "num_steps"),
    # Killed; in the middle of an epoch whose order came from the global random state; in the second pass of a stream.
    [("killed", 6, 4), ("order", 12, 8), ("stream", 13, 9)],
)
def test_training_goes_on_to_the_same_weights(trained, name, checkpoint, num_steps):
    folder, text = trained
    assert f"resumes from checkpoints_{name}/checkpoint-{checkpoint}\n" in text
    assert len(facts(folder, name)["seen"]) == num_steps
    for rank in range(2):
        assert facts(folder, name, rank)["seen"] == facts(folder, f"{name}_whole", rank)["seen"][-num_steps:]
    assert difference(folder, name, f"{name}_whole") == 0


def test_incomplete_checkpoint_is_passed_over(trained):
    assert "checkpoints_order/checkpoint-14 is skipped: optimizer.pt has 0 bytes of " in trained[1]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_other_numbers_of_ranks_keep_the_remaining_samples(trained, num_ranks):
    folder, _ = trained
    name = f"elastic_{num_ranks}"
    shutil.copytree(folder / "elastic" / "checkpoint-5", folder / name / "checkpoint-5")
    # The last is asked for its 5 steps and has them: it makes no step more.
    ended = {**ELASTIC, "from": "elastic/checkpoint-5", "args": {"max_steps": 5, "save_strategy": "no"}}
    again = train(folder, num_ranks, {name: {**ELASTIC, "folder": name}, "ended": ended})
    assert f"resumes from {name}/checkpoint-5\n" in again
    runs = [("elastic_2", 2, 0), ("elastic_2", 2, 1), (name, num_ranks, 0)]
    seen = [facts(folder, name, rank, attempt)["seen"] for name, n, attempt in runs for rank in range(n)]
    assert [len(steps) for steps in seen] == [4, 4, 1, 1, *[5] * num_ranks]
    assert sorted(i for steps in seen for step in steps for i in step) == list(range(40))
    assert difference(folder, name, "elastic_whole") < 1e-6
    assert facts(folder, "ended", attempt=0)["seen"] == []


def test_checkpoints_are_complete_and_no_more_than_asked_for(trained):
    folder, _ = trained
    assert facts(folder, "order", attempt=0)["folders"] == ["checkpoint-12", "checkpoint-14"]
    best = facts(folder, "best")
    assert [f"checkpoints_best/{name}" for name in best["folders"]] == [best["best"]]
    state = json.loads((folder / best["best"] / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == best["best"]
    manifest = json.loads((folder / "elastic" / "checkpoint-4" / "unsloth_multigpu.json").read_text())["manifest"]
    assert (manifest["world_size"], manifest["step"]) == (2, 4)
    assert manifest["cursor"] == {"steps": 4}
    assert {"optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} < manifest["files"].keys()
