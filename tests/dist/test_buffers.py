"""Buffers that change while two ranks train: running statistics as in one process, and all equal on both ranks."""

from pathlib import Path

import pytest
import torch

from tests.helpers.outcome import outcome
from tests.helpers.run import BARE, run_python

SCRIPT = Path(__file__).parent / "scripts" / "buffers.py"
WHOLE = ["whole", "average", "twice", "three"]
STATISTICS = [f"{layer}.{name}" for layer in ("norm", "outer") for name in ("running_mean", "running_var")]
COUNTERS = ["norm.num_batches_tracked", "outer.num_batches_tracked"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("buffers")
    for num_ranks in (1, 2):
        run = run_python([SCRIPT, str(num_ranks), path / str(num_ranks), *WHOLE, "shared", "counting"], path, BARE)
        assert run.code == 0, run.err
        (path / f"{num_ranks}.txt").write_text(run.err)
    return path


@pytest.mark.parametrize("job", [*WHOLE, "counting"])
def test_running_statistics_of_whole_micro_batches_are_those_of_one_process(folder, job):
    (one, before), (two, after) = outcome(folder / "1", job), outcome(folder / "2", job)
    for name in STATISTICS:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-6)
    assert all(after[name] == before[name] for name in COUNTERS)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("job", [*WHOLE, "shared", "counting"])
def test_buffers_end_equal_on_all_ranks(folder, job):
    (_, first), (_, second) = (outcome(folder / "2", job, rank) for rank in range(2))
    assert {n: t.shape for n, t in first.items()} == {n: t.shape for n, t in second.items()}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_statistics_of_parts_count_each_micro_batch_once_and_are_said_to_differ(folder):
    (_, one), (_, two) = outcome(folder / "1", "shared"), outcome(folder / "2", "shared")
    assert all(two[name] == one[name] for name in COUNTERS)
    text = (folder / "2.txt").read_text()
    assert text.count("the running statistics of 2 BatchNorm layer(s) are not exactly those of one process") == 1


def test_other_buffers_are_named(folder):
    text = (folder / "2.txt").read_text()
    # One of samples and one that grows differ between ranks; passes are counted alike on both.
    assert "each rank changes them by its own samples, and all have rank 0's now: mean, seen" in text
    assert "buffers that training changed, by the samples of each rank: passes" in text
