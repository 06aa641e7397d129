"""Streams whose passes do not divide by the accumulation: the steps of one process, also where it adds what was left.

Without a length, the Trainer of one process leaves the gradient of the last micro-batches to the next pass.
"""

from pathlib import Path

import pytest

from tests.helpers.outcome import assert_trained_as_one, facts_of, outcome
from tests.helpers.run import BARE, run_well

SCRIPT = Path(__file__).parent / "scripts" / "stream.py"
# Nothing of these is to be read that the training does not see.
ONCE = ["handle", "handle_means"]
JOBS = ["tokens", "means", "most", "sized", *ONCE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streams")


def train(folder, num_ranks):
    """Does all jobs when a test first asks for that number of ranks."""
    out = folder / str(num_ranks)
    if not out.exists():
        run_well([SCRIPT, str(num_ranks), out, *JOBS, *(["resumed"] if num_ranks > 1 else [])], folder, BARE)
    return out


@pytest.mark.parametrize("job", JOBS)
def test_steps_are_those_of_one_process(folder, job):
    one, many, _ = assert_trained_as_one(train(folder, 1), train(folder, 2), job)
    if job != "means":
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert many["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)


@pytest.mark.parametrize("job", ONCE)
def test_row_is_read_for_the_training_alone(folder, job):
    of_ranks = [facts["samples"] for facts in facts_of(train(folder, 2) / job)]
    steps = [sorted(mine + other) for mine, other in zip(*of_ranks, strict=True)]
    assert steps == [sorted(rows) for rows in outcome(train(folder, 1), job)[0]["samples"]]
    assert steps[0][0] == 0


def test_left_over_is_in_a_step_of_the_next_pass(folder):
    # Passes of nine micro-batches, two in a step: without a length four steps, with one five.
    loss = outcome(train(folder, 1), "tokens")[0]["loss"]
    assert [i for i, value in enumerate(loss) if value > 1.5 * loss[0]] == [4, 8]
    assert len(outcome(train(folder, 1), "sized")[0]["loss"]) == 2 * 5


@pytest.mark.parametrize("step", ["4", "5"])
def test_training_that_goes_on_has_what_was_left_over_once(folder, step):
    # Checkpoints of the last step before it is left over, and of the step that it is in.
    one, resumed = outcome(train(folder, 1), "tokens")[0], outcome(train(folder, 2), "resumed")[0]
    assert resumed["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert resumed["resumed"][step] == pytest.approx(one["grad_norm"], rel=1e-5)
