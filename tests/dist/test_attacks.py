"""Steps with code of the script's own, on two ranks: the training of one process, or a warning with its size."""

from pathlib import Path

import pytest

from tests.helpers.outcome import distance, outcome
from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "attacks.py"
EXACT = (
    *("chunks_1", "chunks_2", "stock_chunks_1", "changing_weights_1", "counter_1", "few_tags_1", "rare_tags_1"),
    *("gathers_by_accelerate_2", "own_step_1", "own_step_2", "by_progress_2", "by_rate_1", "by_callback_2"),
    *("tuples_2", "ready_2", "counting_2"),
)
# With the step in which it shows.
SAID = {
    "changes_form_1": 9,
    "counter_2": 1,
    "teacher_2": 1,
    "gathers_by_accelerate_1": 1,
    "gathers_by_torch_1": 1,
    "gathers_by_torch_2": 1,
    "hooked_2": 1,
}

OTHERS = ("noisy_2", "tight_1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of both runs."""
    folder = tmp_path_factory.mktemp("attacks")
    for num_ranks in (1, 2):
        arguments = [
            "--num-gpus",
            num_ranks,
            "--jobs",
            ",".join([*EXACT, *SAID, *OTHERS]),
            "--out",
            folder / str(num_ranks),
        ]
        run = run_python([SCRIPT, *map(str, arguments)], folder, BARE)
        assert run.code == 0, run.err
    return folder


def facts_of(folder, job):
    return outcome(folder / "2", job)[0]


def difference(folder, job):
    """The larger one of the relative differences of gradient norms and of weights."""
    (one, weights), (two, of_ranks) = (outcome(folder / str(n), job) for n in (1, 2))
    assert len(one["grad_norm"]) == len(two["grad_norm"]) > 0
    norms = (abs(a - b) / max(a, 1e-9) for a, b in zip(one["grad_norm"], two["grad_norm"], strict=True))
    return max(*norms, distance(weights, of_ranks))


def warnings(folder, job):
    return [text for level, text in facts_of(folder, job)["said"] if level == "WARNING"]


@pytest.mark.parametrize("job", EXACT)
def test_code_of_a_script_trains_as_in_one_process(folder, job):
    assert difference(folder, job) < 1e-5
    assert warnings(folder, job) == []
    first = facts_of(folder, job)["first_step"]
    assert first["is_exact"]
    assert first["difference"] < 1e-5
    assert facts_of(folder, job)["inexact"] == ""


@pytest.mark.parametrize(("job", "step"), SAID.items())
def test_what_ranks_cannot_share_is_said_in_the_step_where_it_shows(folder, job, step):
    (warning,) = warnings(folder, job)
    assert warning.startswith("first step: " if step == 1 else f"step {step}: ")
    assert "this is not exactly the training of one process" in warning
    assert facts_of(folder, job)["inexact"] in warning
    assert facts_of(folder, job)["first_step"]["is_exact"] == (step > 1)
    # Said for a reason.
    assert difference(folder, job) > 1e-5


@pytest.mark.parametrize("job", ["counter_2", "counting_2"])
def test_a_comparison_leaves_the_scripts_own_state_as_it_was(folder, job):
    one, two = (outcome(folder / str(n), job)[0]["num_calls"] for n in (1, 2))
    assert (one, two) == (12, 6)


def test_random_numbers_of_a_loss_are_equal_in_the_comparison_and_said_to_be_others_in_the_training(folder):
    (line,) = [text for _, text in facts_of(folder, "noisy_2")["said"] if text.startswith("first step: ")]
    assert line.endswith("; drawn anew on each rank: the model or its loss")
    assert facts_of(folder, "noisy_2")["first_step"]["is_exact"]


def test_micro_batch_that_one_device_cannot_hold_is_not_compared_and_nothing_is_lost(folder):
    facts = facts_of(folder, "tight_1")
    why = "the script's own micro-batch does not fit on one device"
    assert facts["first_step"]["not_compared"] == why
    (warning,) = warnings(folder, "tight_1")
    assert f"not compared with one process: {why}; it is not known how OwnLoss" in warning.replace("Tight", "OwnLoss")
    assert difference(folder, "tight_1") < 1e-5  # Its rows have equal weights, so that what is taken for it is right.


def test_last_line_repeats_that_it_was_not_exact(folder):
    said = [text for level, text in facts_of(folder, "counter_2")["said"] if text.startswith("trained ")]
    assert "; not exactly the training of one process: first step: " in said[0]
