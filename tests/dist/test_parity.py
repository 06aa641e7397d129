"""The same training: samples, gradient norms and weights of two ranks (thorough: three) against one process.

Shapes are rows x batch size x accumulation. 24x4x2 divides evenly; in 26x3x3 neither the step of nine samples nor the
epoch's last step of eight does, nor its last micro-batch of two; in 19x3x3 the last step has one sample for all ranks.
"""

from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.helpers.outcome import assert_trained_as_one, outcome
from tests.helpers.run import LIGHT, run_well
from tests.helpers.tiny import SMALLEST, build_tiny

SCRIPT = Path(__file__).parent / "scripts" / "parity.py"
KINDS = ("trainer_peft", "sft_lora", "sft_full", "dpo", "classifier", "sft_padding_free", "sft_packing")
JOBS = [*(f"{kind}:26x3x3" for kind in KINDS), "sft_lora:24x4x2", "trainer_peft:19x3x3"]
# Three ranks divide none of these evenly; what divides is shown by two.
ON_THREE = [job for job in JOBS if not job.endswith("24x4x2")]
THREE = pytest.param(3, marks=pytest.mark.thorough)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("parity")
    build_tiny(path / "model", **SMALLEST)
    return path


def train(folder, num_ranks):
    """Trains when a test first asks for that number of ranks."""
    out = folder / str(num_ranks)
    if out.exists():
        return
    jobs = ON_THREE if num_ranks == 3 else JOBS
    run = run_well([SCRIPT, num_ranks, folder / "model", out, *jobs], folder, LIGHT)
    (out / "stderr.txt").write_text(run.err)


def facts_of(folder, num_ranks, job):
    train(folder, num_ranks)
    return [outcome(folder / str(num_ranks), job, rank)[0] for rank in range(num_ranks)]


def samples(ranks):
    """Of each step, on all ranks."""
    return Counter(
        (step, row) for rank in ranks for step, rows in rank["seen"].items() for row in Counter(rows).elements()
    )


@pytest.mark.parametrize("num_ranks", [2, THREE])
def test_ranks_train_as_one_process_and_end_with_equal_weights(folder, num_ranks):
    train(folder, 1)
    train(folder, num_ranks)
    for job in JOBS if num_ranks == 2 else ON_THREE:
        one, *many = assert_trained_as_one(folder / "1", folder / str(num_ranks), job, num_ranks, weights=1e-5)
        assert samples(many) == samples([one]) != Counter(), job
        assert many[0]["loss"] == pytest.approx(one["loss"], rel=1e-4), job


@pytest.mark.parametrize(
    ("num_ranks", "equations"),
    [
        (2, ["8 = 2 ranks x 4 samples x 1 accumulation", "9 = 4 + 5 samples on 2 ranks"]),
        pytest.param(3, ["9 = 3 ranks x 3 samples x 1 accumulation"], marks=pytest.mark.thorough),
    ],
)
def test_equation_is_printed(folder, num_ranks, equations):
    train(folder, num_ranks)
    text = (folder / str(num_ranks) / "stderr.txt").read_text()
    assert all(f"samples per step: {equation}" in text for equation in equations)


def test_steps_are_planned_by_length(folder):
    train(folder, 2)
    lines = (folder / "2" / "stderr.txt").read_text().splitlines()
    planned = [line for line in lines if "samples per step" in line]
    # Losses that are means over rows are dealt in order; with TRL before 1.0 and without padding, rows get their tokens
    # when they are read.
    kinds = ("dpo", "classifier", *(["sft_padding_free"] if Version(version("trl")) < Version("1") else []))
    num_in_order = sum(job.startswith(kinds) for job in JOBS)
    assert sum("dealt by length" in line for line in planned) == len(planned) - num_in_order


def test_unused_parameters_are_not_searched(folder):
    jobs = [job for job in JOBS if "classifier" not in job]
    assert not any(facts_of(folder, 2, job)[0]["find_unused_parameters"] for job in jobs)


def test_random_choices_after_training_are_equal(folder):
    first, second = facts_of(folder, 2, JOBS[0])
    assert first["random_after"] == second["random_after"]
