"""Gradient strategies inside Hugging Face's loop: those that meet in every step give DDP's result."""

import json
from pathlib import Path

import pytest

from tests.helpers.outcome import largest_difference
from tests.helpers.run import light, run_python

SCRIPT = Path(__file__).parent / "scripts" / "strategies.py"
LIBRARIES = light("datasets", "rich", "triton")
pytestmark = [pytest.mark.slow, pytest.mark.thorough]

# One row length: a rank's own mean is then its part of the step's. SGD: the mean of steps is the step of the mean.
PLAIN = {"length": 12, "optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.05, "max_steps": 10}
EVERY_4 = {"strategy": "diloco:every_steps=4", "verify_every": 1, "args": {**PLAIN, "save_strategy": "steps"}}
EVERY_STEP = {
    "ddp": {},
    "allreduce": {"strategy": "allreduce", "verify_every": 1},
    "parameter_server": {"strategy": "parameter_server", "verify_every": 1},
}
MORE = {
    "ddp_bf16": {"args": {"bf16": True, "full": True, "max_steps": 6}},
    "server_bf16": {"strategy": "parameter_server", "args": {"bf16": True, "full": True, "max_steps": 6}},
    "own_weights": {"strategy": "allreduce", "verify_every": 1, "begin": "nothing"},
    "ddp_plain": {"args": PLAIN},
    "local_1": {"strategy": "local_sgd:every_steps=1", "args": PLAIN},
    "local_8": {"strategy": "local_sgd:every_steps=8", "args": PLAIN},
    "diloco": {**EVERY_4, "args": {**EVERY_4["args"], "save_steps": 8, "max_steps": 12}},
    "diloco_resumed": {
        **EVERY_4,
        "args": {**EVERY_4["args"], "save_steps": 8, "max_steps": 12},
        "resume": "checkpoints_diloco/checkpoint-8",
    },
}


def train(path, runs):
    return run_python([SCRIPT, "2", *(f"{name}={json.dumps(line)}" for name, line in runs.items())], path, LIBRARIES)


@pytest.fixture(scope="module")
def every_step(tmp_path_factory):
    path = tmp_path_factory.mktemp("every_step")
    run = train(path, EVERY_STEP)
    assert run.code == 0, run.err
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("strategies")
    run = train(path, MORE)
    assert run.code == 0, run.err  # The script catches the error of "own_weights", and trains again.
    return path


def facts(folder, name):
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(2)]


def weight_difference(folder, first, second):
    return largest_difference(folder / f"{first}.safetensors", folder / f"{second}.safetensors")


def norm_difference(folder, first, second):
    one, other = facts(folder, first)[0]["norms"], facts(folder, second)[0]["norms"]
    assert len(one) == len(other)
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["allreduce", "parameter_server"])
def test_strategy_that_meets_in_every_step_equals_ddp(every_step, name):
    assert len(facts(every_step, name)[0]["norms"]) == 20
    assert norm_difference(every_step, "ddp", name) < 1e-5
    assert weight_difference(every_step, "ddp", name) < 1e-5
    mine, other = facts(every_step, name)
    assert mine["hashes"] == other["hashes"]
    assert mine["rates"] == facts(every_step, "ddp")[0]["rates"]
    assert (facts(every_step, "ddp")[0]["wrapper"], mine["wrapper"]) == (
        "DistributedDataParallel",
        "PeftModel",
    )


def test_mixed_precision_equals_ddp(folder):
    assert norm_difference(folder, "ddp_bf16", "server_bf16") < 1e-3
    # Adam turns the rounding of a vanishing gradient into a whole step: of the first, lr x steps is the limit.
    assert weight_difference(folder, "ddp_bf16", "server_bf16") < 5e-3


def test_weights_of_its_own_on_each_rank_are_caught(folder):
    for rank in facts(folder, "own_weights"):
        assert rank["error"].startswith(
            "DivergenceError: The ranks' replicas differ after step 1: rank 1 differs from rank 0 "
        )


def test_local_steps_that_meet_each_time_equal_ddp(folder):
    assert weight_difference(folder, "ddp_plain", "local_1") < 1e-5


def test_local_steps_meet_when_they_should(folder):
    mine, other = facts(folder, "local_8")
    # The callback of the test comes before the meeting at the end of the training.
    equal = [step for step, (a, b) in enumerate(zip(mine["hashes"], other["hashes"], strict=True), 1) if a == b]
    assert equal == [8]
    # 2 meetings, the last one at the end, instead of 10; both send all first weights and all buffers each time.
    sent = [facts(folder, name)[0]["sent_bytes"] for name in ("local_1", "local_8")]
    assert sent[0] - sent[1] == 8 * (2 * 1024 * 2 + 2 * 8 * 8)
    assert 0 < weight_difference(folder, "local_1", "local_8") < 0.1


def test_outer_momentum_is_in_the_checkpoint(folder):
    assert weight_difference(folder, "diloco", "diloco_resumed") == 0
    assert facts(folder, "diloco_resumed")[1]["hashes"] == facts(folder, "diloco")[1]["hashes"][8:]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    path = tmp_path_factory.mktemp("ends")
    run = run_python([SCRIPT.with_name("strategy_ends.py")], path, LIBRARIES)
    assert run.code == 69, run.err  # The last training is refused, and the script catches the error.
    return [json.loads((path / f"ends_{rank}.json").read_text()) for rank in range(2)]


def test_best_checkpoint_stays_loaded(ended):
    assert [rank["best"] for rank in ended] == [0.0, 0.0]


def test_model_of_another_strategy_is_wrapped_again_or_refused(ended):
    for rank in ended:
        assert rank["ddp_after_diloco"] == ""
        assert "strategy='diloco:every_steps=4', but the model is wrapped in DDP" in rank["diloco_after_ddp"]
