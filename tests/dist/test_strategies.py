"""Gradient strategies inside Hugging Face's loop: those that meet in every step give DDP's result."""

import json
from pathlib import Path

import pytest

from tests.helpers.outcome import facts_of, largest_difference
from tests.helpers.run import BARE, PLAIN, run_python, run_well

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.slow, pytest.mark.thorough]

USUAL = {"max_steps": 20, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
PLAIN_LINE = {"lora": True, "args": {**USUAL, "save_strategy": "no"}}
# A checkpoint has the inner optimizer of one rank; SGD has no state.
SAVES = {**USUAL, "max_steps": 12, "optim": "sgd", "learning_rate": 0.05, "save_steps": 8}
# The planner measures, and no two runs measure the same.
DILOCO = {
    "lora": True,
    "options": {"strategy": "diloco:every_steps=4", "verify_every": 1, "balance": "off"},
    "folder": "diloco",
    "args": SAVES,
}
RUNS = {
    "ddp": PLAIN_LINE,
    **{
        name: {**PLAIN_LINE, "options": {"strategy": name, "verify_every": 1}}
        for name in ("allreduce", "parameter_server")
    },
    "diloco": DILOCO,
    "diloco_resumed": {**DILOCO, "folder": "resumed", "from": "diloco/checkpoint-8"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("strategies")
    run_well([SCRIPTS / "resume.py", "2", "{}", *(f"{n}={json.dumps(line)}" for n, line in RUNS.items())], path, PLAIN)
    return path


def facts(folder, name):
    return [json.loads((folder / f"{name}_{rank}_0.json").read_text()) for rank in range(2)]


def weight_difference(folder, first, second):
    return largest_difference(folder / f"{first}.safetensors", folder / f"{second}.safetensors")


@pytest.mark.parametrize("name", ["allreduce", "parameter_server"])
def test_strategy_that_meets_in_every_step_equals_ddp(folder, name):
    """The replicas are compared after every step."""
    (ddp, _), (mine, _) = facts(folder, "ddp"), facts(folder, name)
    assert len(mine["grad_norm"]) == 20
    assert mine["grad_norm"] == pytest.approx(ddp["grad_norm"], rel=1e-5)
    assert weight_difference(folder, "ddp", name) < 1e-5
    assert mine["learning_rate"] == ddp["learning_rate"]
    assert (ddp["wrapper"], mine["wrapper"]) == ("DistributedDataParallel", "PeftModel")


def test_outer_momentum_is_in_the_checkpoint(folder):
    assert weight_difference(folder, "diloco", "diloco_resumed") == 0
    for whole, resumed in zip(facts(folder, "diloco"), facts(folder, "diloco_resumed"), strict=True):
        assert resumed["seen"] == whole["seen"][8:]


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    path = tmp_path_factory.mktemp("ends")
    run = run_python([SCRIPTS / "strategies.py"], path, BARE)
    assert run.code == 69, run.err  # The last training is refused, and the script catches the error.
    return facts_of(path / "ends")


def test_best_checkpoint_stays_loaded(ends):
    assert [rank["best"] for rank in ends] == [0.0, 0.0]
    assert ends[0]["evaluated"] == ends[1]["evaluated"]


def test_model_of_another_strategy_is_wrapped_again_or_refused(ends):
    for rank in ends:
        assert rank["ddp_after_diloco"] == "None"
        assert "strategy='diloco:every_steps=4', but the model is wrapped in DDP" in rank["diloco_after_ddp"]
